"""The model outputs that a config may name."""

from trak_core.model_outputs._classification import CLASSIFICATION
from trak_core.model_outputs._language import LANGUAGE_MODELLING
from trak_core.model_outputs._regression import REGRESSION
from trak_core.model_outputs._segmentation import SEGMENTATION

# Texts are classified as images are: their samples differ, f does not.
MODEL_OUTPUTS = {
    "image_classification": CLASSIFICATION,
    "text_classification": CLASSIFICATION,
    "language_modelling": LANGUAGE_MODELLING,
    "regression": REGRESSION,
    "segmentation": SEGMENTATION,
}
