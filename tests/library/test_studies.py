"""Ready-made studies, beside what a person would write for the same files."""

import json
import re
import shutil
import socket
import sys
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from refused import refused

from trak_core.config.bind_study_arguments import with_ready_study
from trak_core.ready_made.image_folder import image_folder
from trak_core.ready_made.language_model import language_model
from trak_core.ready_made.ready_study import needed
from trak_core.ready_made.tabular import tabular
from trak_core.ready_made.text_classification import text_classification
from trak_core.study.load_checkpoint import load_checkpoint

pytestmark = pytest.mark.usefixtures("here")
transformers = pytest.importorskip("transformers", reason="with the extra `test`")
few_words, small = pytest.importorskip("few_words"), pytest.importorskip("texts")
ids, tokenizer, write = few_words.ids, few_words.tokenizer, few_words.write
NET = "from torch import nn\n\ndef net(n=2):\n    return nn.Linear(2, n)\n"


@pytest.fixture
def weights(tmp_path):
    small.gpt2().save_pretrained(tmp_path / "out")
    tokenizer().save_pretrained(tmp_path / "out")
    return tmp_path / "out"


def test_texts_of_a_language_model(weights, tmp_path):
    rows = [{"id": "a", "text": "sky is blue"}, {"id": "b", "text": "the grass"}]
    study = language_model(write(tmp_path / "train.jsonl", rows), str(weights))
    assert study.train_ids() == ["a", "b"]
    assert [s["input_ids"].tolist() for s in study.train_data()] == [ids(r["text"]) for r in rows]
    assert all(torch.equal(s["labels"], s["input_ids"]) for s in study.train_data())
    assert study.describe(study.train_data()[0]) == "sky is blue"
    assert study.encode(text="red sun")["input_ids"].tolist() == ids("red sun")
    keys = small.gpt2().state_dict()
    assert {k: v.shape for k, v in study.make_model().state_dict().items()} == {
        k: v.shape for k, v in keys.items()
    }
    with refused("studies.no_targets"):
        study.target_data()
    other = language_model(str(tmp_path / "train.jsonl"), str(weights), text="{question}")
    with refused("studies.template", "question", "id, text", f"{tmp_path}/train.jsonl, line 1"):
        other.train_data()[0]


def test_a_prompt_does_not_count_and_a_long_text_is_cut_where_that_is_said(weights, tmp_path):
    rows = [{"prompt": "what is red", "completion": "the sun"}]
    file = write(tmp_path / "train.jsonl", rows)
    templates = {"prompt": "{prompt} ", "text": "{completion}"}
    study = language_model(file, str(weights), **templates, targets=file)
    plain = language_model(file, str(weights), text="{completion}").encode
    assert plain(text="red sun")["input_ids"].tolist() == ids("red sun")  # as `trak ask` has a line
    assert plain(completion="red sun")["input_ids"].tolist() == ids("red sun")
    (sample,) = study.train_data()
    question = language_model(file, str(weights)).encode(prompt="what is red ", text="the sun")
    assert torch.equal(question["labels"], sample["labels"])
    assert sample["input_ids"].tolist() == ids("what is red the sun")
    assert sample["labels"].tolist() == [-100, -100, -100, *ids("the sun")]
    assert torch.equal(study.target_data()[0]["labels"], sample["labels"])
    cut = language_model(file, str(weights), **templates, max_tokens=4)
    assert cut.train_data()[0]["labels"].tolist() == [-100, -100, -100, *ids("the")]


def test_a_prompt_that_runs_into_its_text_is_told_of_once(weights, tmp_path, capsys):
    """A script without spaces has no notice."""
    rows = [{"prompt": "what is", "text": text} for text in ("red", " red", "blue")]
    study = language_model(write(tmp_path / "train.jsonl", rows), str(weights))
    asked = {"prompt": "the sun", "text": "is red"}
    for prompt, text in (("what is ", "red"), ("what is", ", red"), ("\u6f22", "\u5b57")):
        study.encode(prompt=prompt, text=text)
    assert capsys.readouterr().err == ""
    study.encode(text="red")
    assert "joined" not in capsys.readouterr().err
    list(study.train_data())
    for _ in range(2):
        study.encode(**asked)
    told = capsys.readouterr().err
    assert re.findall(r"joined without a space, into '(.*?)'", told) == ["isred"]
    assert told.count("Notice: ") == 1


def test_a_prompt_whose_last_space_becomes_part_of_the_text_is_told_of(weights, tmp_path, capsys):
    import tokenizers

    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    core.train_from_iterator(["sky is blue", "grass is green"] * 9, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(weights)
    study = language_model(write(tmp_path / "train.jsonl", [{"text": "sky"}]), str(weights))
    for prompt, text, n in (("is", " blue", 0), ("is ", " blue", 0), ("is ", "blue", 1)):
        study.encode(prompt=prompt, text=text)
        assert capsys.readouterr().err.count("a prompt ends with a space") == n


@pytest.mark.parametrize("name", ["promt", "Prompt", "prompts", "promtp"])
def test_a_misspelt_prompt_is_refused(weights, tmp_path, name):
    """Without a word the model would get the text alone."""
    rows = [{"text": "sky", "prompt_id": 3, "topic": "day"}, {"text": "red", name: "what is"}]
    file = write(tmp_path / "train.jsonl", rows)
    study = language_model(file, str(weights))
    first = study.train_data()[0]
    assert study.train_columns().columns.tolist() == ["prompt_id", "topic", name]
    with refused("studies.near_prompt", f"{tmp_path}/train.jsonl, line 2", repr(name)):
        study.train_data()[1]
    with refused("studies.near_prompt", repr(name)):
        study.encode(**rows[1])
    both = study.encode(**rows[1], prompt="what is ")
    assert both["input_ids"].tolist() == ids("what is red")
    for given in ({"prompt": ""}, {"text": f"{{{name}}}"}):
        told = language_model(file, str(weights), **given).train_data()[1]
        assert told["input_ids"].tolist() == ids("what is" if "text" in given else "red")
    assert first["input_ids"].tolist() == ids("sky")


def test_a_row_without_a_value_is_refused(weights, tmp_path):
    empty = write(tmp_path / "empty.jsonl", [{"prompt": None, "text": "sky"}, {"text": None}])
    first, second = language_model(empty, str(weights)).train_data().rows
    assert language_model(empty, str(weights)).encode(**first)["input_ids"].tolist() == ids("sky")
    with refused("studies.template", "text"):
        language_model(empty, str(weights)).encode(**second)
    third = '{"text": "sky"}\n\n{"id": 1, "txt": "sky"}\n'
    (tmp_path / "empty.jsonl").write_text(third)
    with refused("studies.template", f"{tmp_path}/empty.jsonl, line 3", "id, txt"):
        language_model(empty, str(weights)).train_data()[-1]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers', by peft
def test_a_trainer_s_folder_and_an_adapter(weights, tmp_path):
    file = write(tmp_path / "train.jsonl", [{"text": "sky"}])
    (tmp_path / "trainer").mkdir()
    for step in (5, 10):
        weights.joinpath("config.json").parent.rename(tmp_path / f"trainer/checkpoint-{step}")
        small.gpt2().save_pretrained(weights)
        tokenizer().save_pretrained(weights)
    study = language_model(file, str(tmp_path / "trainer"))
    assert study.make_model().config.n_embd == small.gpt2().config.n_embd
    adapter = few_words.adapter(tmp_path / "adapter", str(weights))
    model = language_model(file, str(adapter)).make_model()
    trained = {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"lora_A", "lora_B"}
    given = {"texts": file, "weights": str(adapter)}
    config = with_ready_study({"study": "language_model", "study_arguments": given})
    assert str(weights / "model.safetensors") in config["data_files"]
    (weights / "tokenizer_config.json").unlink()
    with refused("studies.tokenizer", weights):
        language_model(file, str(weights))
    with refused("studies.weights", tmp_path):
        language_model(file, str(tmp_path))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers', by peft
@pytest.mark.parametrize("settings", [{"modules_to_save": ["wte"]}, {"target_modules": ["wte"]}])
def test_an_adapter_may_have_more_tokens_than_its_base(weights, tmp_path, settings):
    from peft import LoraConfig, get_peft_model

    base = transformers.GPT2LMHeadModel.from_pretrained(weights)
    base.resize_token_embeddings(base.config.vocab_size + 3)
    given = {"target_modules": ["c_attn"], "fan_in_fan_out": True, **settings}
    trained = get_peft_model(base, LoraConfig(**given, init_lora_weights=False))
    trained.peft_config["default"].base_model_name_or_path = str(weights)
    trained.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    tokenizer().save_pretrained(tmp_path / "adapter")
    file = write(tmp_path / "train.jsonl", [{"text": "sky"}])
    model = language_model(file, str(tmp_path / "adapter")).make_model()
    load_checkpoint(model, tmp_path / "adapter")
    tokens = torch.arange(base.config.vocab_size)[None, -8:]
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, trained.eval()(tokens).logits)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers', by peft
def test_an_adapter_s_base_is_found_without_network(weights, tmp_path, monkeypatch):
    file = write(tmp_path / "train.jsonl", [{"text": "sky"}])
    # As the hub's cache has a model.
    cache = tmp_path / "hub/models--people--base"
    shutil.copytree(weights, cache / "snapshots/abc")
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    saved = transformers.GPT2LMHeadModel.from_pretrained(weights).transformer.wte.weight
    asked_network = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **_: asked_network.append(given))

    def made(base):
        adapter = few_words.adapter(tmp_path / "deep/adapter", base)
        return language_model(file, str(adapter)).make_model()

    for base in ("../../out", "out", str(weights), "people/base"):
        assert torch.equal(made(base).get_input_embeddings().weight, saved)
    for base in ("gone", "people/gone", "../gone/base", "/gone/base"):
        with refused("studies.adapter_base", tmp_path / "deep/adapter", tmp_path, f"Found {base}"):
            made(base)
    assert asked_network == []


def test_labelled_texts(tmp_path):
    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1, pad_token_id=0)
    config.label2id, config.id2label = {"no": 0, "yes": 1}, {0: "no", 1: "yes"}
    transformers.GPT2ForSequenceClassification(config).save_pretrained(tmp_path / "out")
    tokenizer().save_pretrained(tmp_path / "out")
    rows = [{"text": "sky is blue", "label": "yes"}, {"text": "sky is", "label": 0}]
    file = write(tmp_path / "train.jsonl", rows)
    study = text_classification(file, str(tmp_path / "out"), max_tokens=4)
    samples = study.train_data()
    assert samples[0]["input_ids"].tolist() == [*ids("sky is blue"), 0]
    assert samples[0]["attention_mask"].tolist() == [1, 1, 1, 0]
    assert [int(samples[i]["labels"]) for i in (0, 1)] == [1, 0]
    assert study.make_model()(**{k: v[None] for k, v in samples[0].items()}).logits.shape == (1, 2)
    assert study.class_names() == ["no", "yes"]
    config.id2label, config.label2id = {1: "no", 2: "yes"}, {"no": 1, "yes": 2}
    config.save_pretrained(tmp_path / "out")
    assert text_classification(file, str(tmp_path / "out")).class_names() == []


def test_images_in_folders_and_in_a_table(tmp_path):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (3, 4, 5, 3), dtype=np.uint8)
    for array, name in zip(pixels, ("dog/1.png", "cat/b/2.PNG", "dog/3.png"), strict=True):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(tmp_path / "images" / name)
    (tmp_path / "nets.py").write_text(NET)
    net = f"{tmp_path}/nets.py:net"
    study = image_folder(str(tmp_path / "images"), net)
    assert study.train_ids() == ["cat/b/2.PNG", "dog/1.png", "dog/3.png"]
    assert [int(label) for _, label in study.train_data()] == [0, 1, 1]
    expected = torch.tensor(pixels[0]).permute(2, 0, 1) / 255
    assert torch.equal(study.train_data()[1][0], expected)
    assert study.describe(study.train_data()[1]) == "dog"
    assert study.make_model().out_features == 2
    table_file = tmp_path / "labels.csv"
    table_file.write_text("id,path,label,annotator\nx,images/dog/3.png,wolf,anna\n")
    of_table = image_folder(str(table_file), net, classes=["wolf", "dog"])
    assert of_table.train_ids() == ["x"]
    assert torch.equal(of_table.train_data()[0][0], torch.tensor(pixels[2]).permute(2, 0, 1) / 255)
    with refused("studies.label", "wolf", "cat, dog"):
        image_folder(str(table_file), net, classes=["cat", "dog"]).train_data()[0]
    (tmp_path / "nets.py").write_text(f"{NET}\ndef prepared(image):\n    return 3\n")
    other = image_folder(str(tmp_path / "images"), net, transform=f"{tmp_path}/nets.py:prepared")
    with refused("studies.transform", "int"):
        other.train_data()[0]
    rows = [{"path": "images/dog/3.png", "label": label} for label in (2, 10, 0)]
    numbered = image_folder(write(tmp_path / "numbers.jsonl", rows), net)
    assert [int(label) for _, label in numbered.train_data()] == [2, 10, 0]
    assert numbered.make_model().out_features == 11
    (tmp_path / "images/dog/.hidden").mkdir()
    Image.fromarray(pixels[0]).save(tmp_path / "images/dog/.hidden/4.png")
    assert image_folder(str(tmp_path / "images"), net).train_ids() == study.train_ids()
    (tmp_path / "images/wolf").symlink_to(tmp_path / "images/dog")
    with refused("studies.linked_images", tmp_path / "images", "wolf"):
        image_folder(str(tmp_path / "images"), net)
    (tmp_path / "images/wolf").unlink()
    with refused("studies.no_images", tmp_path / "images/cat"):
        image_folder(str(tmp_path / "images/cat/b"), net)
    for wrong in ("nets:net", f"{tmp_path}/nets.py:other"):
        with refused("studies.function"):
            image_folder(str(tmp_path / "images"), wrong).make_model()


def test_a_network_that_no_library_has(tmp_path):
    """tests/stages/test_real_networks.py has those that there are."""
    (tmp_path / "images/a").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "images/a/1.png")
    for wrong, close in (("torchvision/resnet81", "resnet18"), ("x/y", "timm/resnet18")):
        study = image_folder("images", wrong)
        if wrong == "x/y" or find_spec("torchvision"):
            with refused("studies.network", wrong, close):
                study.make_model()
        else:
            with refused("studies.package", sys.executable, "torchvision", "vision"):
                study.make_model()


def test_what_a_line_lacks_is_said(weights, tmp_path):
    """As an example that can be typed; no argument of a study's is named."""
    (tmp_path / "nets.py").write_text(NET)
    (tmp_path / "images/cat").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "images/cat/1.png")
    images = image_folder("images", "nets.py:net")
    example = '{"path": "new/17.png", "label": "cat"}'
    with refused("studies.line", "path, label", example, '{"text": "images/cat/1.png"}'):
        images.encode(text="images/cat/1.png")
    with refused("studies.line", "no field label", example):
        images.encode(path="images/cat/1.png")
    with refused("studies.image_file", "none.png"):
        images.encode(path="none.png", label="cat")
    with refused("studies.label", "wolf", "cat"):
        images.encode(path="images/cat/1.png", label="wolf")
    assert int(images.encode(path="images/cat/1.png", label="cat")[1]) == 0
    (tmp_path / "rows.csv").write_text("a,b,kind\n1,2,0\n")
    table = tabular("rows.csv", "kind", "nets.py:net")
    with refused("studies.line", "b, kind", '{"a": "1", "b": "2", "kind": "0"}'):
        table.encode(a=1)
    (tmp_path / "rows.csv").write_text("a,b,kind\n1,2,paid\n1,2,due\n")
    table = tabular("rows.csv", "kind", "nets.py:net", classes=["paid", "due"])
    unknown = "If the label of a row to explain is unknown, write the class to explain"
    with refused("studies.line", "Found no field kind in", unknown):
        table.encode(a=1, b=2)
    for cell in ("Paid", "paid ", "", "0"):
        with refused("studies.numbers", f'{{"kind": "{cell}"}}', "paid, due") as caught:
            table.encode(a=1, b=2, kind=cell)
        assert (unknown in str(caught.value)) == (cell == "")
    with refused("studies.numbers", '{"b": "1,5"}'):
        table.encode(a=1, b="1,5", kind="paid")
    rows = write(tmp_path / "train.jsonl", [{"question": "the", "answer": "sky", "label": 1}])
    texts = language_model(rows, str(weights), text="{answer}", prompt="{question} ")
    with refused("studies.line", '{"answer": "sky", "question": "the"}', '{"text": "sky"}'):
        texts.encode(text="sky")
    assert texts.encode(answer="sky", question="the")["labels"].tolist()[0] == -100


def test_rows_of_a_table(tmp_path):
    frame = pd.DataFrame({"id": [7, 8], "a": [1.5, 2], "b": [3, 4], "kind": ["no", "yes"]})
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.to_csv(tmp_path / "rows.tsv", index=False, sep="\t")
    (tmp_path / "nets.py").write_text(NET)
    for name in ("rows.csv", "rows.tsv"):
        file, net = str(tmp_path / name), f"{tmp_path}/nets.py:net"
        study = tabular(file, "kind", net, classes=["no", "yes"])
        assert study.train_ids() == [7, 8]
        inputs, label = study.train_data()[1]
        assert (inputs.tolist(), label.item(), label.dtype) == ([2, 4], 1, torch.int64)
    number = tabular(file, "a", net, columns=["b"]).train_data()[0]
    assert (number[0].tolist(), number[1].item()) == ([3], 1.5)
    with refused("studies.numbers", "kind", "rows.tsv, line 2"):
        tabular(file, "a", net).train_data()[0]
    frame.drop(columns="kind").to_csv(tmp_path / "asked.csv", index=False)
    given = {"targets": str(tmp_path / "asked.csv"), "classes": ["no", "yes"]}
    with refused(
        "studies.field", "kind", "id, a, b", "If the label of a row to explain is unknown"
    ):
        tabular(file, "kind", net, **given).target_data()[0]


def test_a_package_that_is_not_installed_is_named():
    with refused("studies.package", sys.executable, "no_such_package"):
        needed("no_such_package", "language")


def test_empty_answers_are_counted(weights, tmp_path, capsys):
    """A template, or a chat template, adds tokens to them, so that they are not refused."""
    empty = [{"role": "user", "content": "sky"}, {"role": "assistant", "content": ""}]
    template = {"prompt": "{a}", "text": " {b} said"}
    tokens = tokenizer()
    tokens.chat_template = few_words.CHAT.replace("{{ m['role'] }}", "user").replace(
        " {% end", " red {% end", 1
    )
    tokens.save_pretrained(weights)
    for number, (full, none, given) in enumerate((
        ({"a": "sky", "b": "blue"}, {"a": "sky", "b": " "}, template),
        ({"text": "blue"}, {"messages": empty}, {}),
        ({"text": "blue"}, {"messages": json.dumps(empty)}, {}),
        ({"text": "blue"}, {"prompt": empty[:1], "text": empty[1:]}, {}),
    )):
        file = write(tmp_path / f"{number}.jsonl", [full, none, full, none])
        study = language_model(file, str(weights), **given)
        assert [len(study.train_data()) for _ in range(2)] == [4, 4]
        told = capsys.readouterr().err
        said = f"Notice: 2 of 4 training rows have an empty text. The first is {file}, line 2."
        assert told.count(said) == 1
        assert told.count("Notice: ") == 1 + ("prompt" in none)  # Other rows have no prompt.
        study.encode(**none)
        assert "a text to explain is empty" in capsys.readouterr().err
        language_model(write(tmp_path / "rows.jsonl", [full]), str(weights), **given).train_data()
        assert "Notice" not in capsys.readouterr().err
