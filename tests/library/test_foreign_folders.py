"""Folders of models that ready-made studies can't take: code of their own, quantized bases."""

import json

import pytest
from refused import refused

from trak_core.ready_made.language_model import language_model
from trak_core.ready_made.text_classification import text_classification
from trak_core.study.load_checkpoint import check_checkpoint, load_checkpoint

transformers = pytest.importorskip("transformers", reason="with the extra `test`")
few_words, small = pytest.importorskip("few_words"), pytest.importorskip("texts")
CODE = {"auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
CODE["auto_map"]["AutoModelForSequenceClassification"] = "code.M"


@pytest.fixture
def folder(here, monkeypatch):
    """A folder with code that must not run, and nobody to ask whether it may."""
    monkeypatch.setattr("builtins.input", lambda text: pytest.fail(text))
    small.gpt2().save_pretrained(path := here / "out")
    few_words.tokenizer().save_pretrained(path)
    (path / "code.py").write_text("open('ran', 'w')\n")
    yield path
    assert not (here / "ran").exists()


def test_a_config_that_weights_do_not_show_is_told(tmp_path, capsys):
    """The number of heads changes no shape. Dropout and the name of a folder change no output."""
    model = small.gpt2()
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    change(file, resid_pdrop=0.5, _name_or_path="elsewhere", use_cache=False, pad_token_id=3)
    load_checkpoint(model, tmp_path)
    assert check_checkpoint(model, tmp_path)[1] == ""
    assert "Notice" not in capsys.readouterr().out
    change(file, n_head=2 * model.config.n_head)
    load_checkpoint(model, tmp_path)
    told = f"n_head {2 * model.config.n_head} instead of {model.config.n_head}"
    assert told in capsys.readouterr().out
    assert told in check_checkpoint(model, tmp_path)[1]


def change(path, **more):
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def made(study, folder):
    file = few_words.write(folder.parent / "rows.jsonl", [{"text": "sky", "label": 0}])
    return study(file, str(folder)).make_model()


@pytest.mark.parametrize("study", [language_model, text_classification])
@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "of_nobody", **CODE},
        {"model_type": "of_nobody", "architectures": ["Mine"], **CODE},
        # Models of transformers' for something else.
        {"model_type": "vit", **CODE},
        {"model_type": "other", "auto_map": {n: f"a/b--{m}" for n, m in CODE["auto_map"].items()}},
    ],
)
def test_a_model_that_needs_code_of_its_own_is_refused_unasked(study, changes, folder):
    (folder / "config.json").write_text(json.dumps(changes))
    with pytest.raises(ValueError, match="trust_remote_code"):
        made(study, folder)


@pytest.mark.parametrize("study", [language_model, text_classification])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_model_of_transformers_with_code_beside_it_is_taken_without(study, file, folder):
    named = CODE if file == "config.json" else {"auto_map": {"AutoTokenizer": ["code.T", None]}}
    change(folder / file, **named)
    assert type(made(study, folder)).__module__.startswith("transformers.models.gpt2")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers', by peft
@pytest.mark.parametrize(
    "about",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"quant_method": "gptq", "bits": 4},
        None,
    ],
)
def test_an_adapter_on_a_quantized_base(about, folder, tmp_path):
    adapter = few_words.adapter(tmp_path / "adapter", str(folder))
    assert made(language_model, adapter)
    if about is None:
        (folder / (told := "quantize_config.json")).write_text("{}")  # AutoGPTQ's
    else:
        change(folder / "config.json", quantization_config=about)
        told = "`quantization_config` in config.json"
    with refused("study.checkpoint_quantized", folder, told):
        made(language_model, adapter)
