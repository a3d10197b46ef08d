"""Model output functions: the number f(z; theta) that attribution explains, and its loss weight."""

from trak_core.model_outputs._classification import CLASSIFICATION, margin
from trak_core.model_outputs._contrast import contrast, drawn_pairs, pair_margins, read_embeddings
from trak_core.model_outputs._language import LANGUAGE_MODELLING, sequence_log_odds
from trak_core.model_outputs._model_output import IGNORED, ModelOutput, read_logits
from trak_core.model_outputs._named import MODEL_OUTPUTS
from trak_core.model_outputs._regression import REGRESSION
from trak_core.model_outputs._segmentation import SEGMENTATION, mean_pixel_margin

__all__ = [
    "CLASSIFICATION",
    "IGNORED",
    "LANGUAGE_MODELLING",
    "MODEL_OUTPUTS",
    "REGRESSION",
    "SEGMENTATION",
    "ModelOutput",
    "contrast",
    "drawn_pairs",
    "margin",
    "mean_pixel_margin",
    "pair_margins",
    "read_embeddings",
    "read_logits",
    "sequence_log_odds",
]
