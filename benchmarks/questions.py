"""Seconds of a question to a run: held in memory by `trak ask`, and by `trak run` once more.

    python benchmarks/questions.py --csv questions.csv

A Llama of 722,048 parameters is trained by transformers' Trainer on 300 texts of four sources, nine
epochs, with three checkpoints, and scored as `study: language_model`. Then questions from 12
held-out texts go into the standard input of `trak ask`, one after the other: the first counts from
the start of the command, imports included, each further one from when it was typed. Beside them
stands what the same question costs as an experiment of its own, `trak run ... scores`. Processor
seconds are those of the processes and their children. The scores of both ways are compared first.
"""

import json
import random
from pathlib import Path
from typing import Any

_N_TRAIN, _N_HELD, _VOCABULARY = 300, 12, 512
_NOUNS = ["fox", "miller", "girl", "sailor", "crow", "king", "tailor", "bear"]
_PLACES = ["the wood", "a mill", "the harbour", "an old tower", "the market", "the river"]
_FOODS = ["leeks", "flour", "butter", "lentils", "apples", "onions", "carrots", "barley"]
_VERBS = ["chop", "boil", "stir", "bake", "roast", "rinse"]
_NAMES = ["total", "rows", "width", "names", "index", "depth"]
_TOWNS = ["Linden", "Harrow", "Belfort", "Moss Bay", "Upton", "Greyfield"]
_EVENTS = ["a new bridge", "the tram line", "a flood wall", "the library", "lower rents"]


def _text(source: str, draw: random.Random) -> str:
    """Return a text of a source, drawn from its patterns."""
    pick, number = draw.choice, draw.randrange(2, 60)
    if source == "stories":
        one, other = draw.sample(_NOUNS, 2)
        return (
            f"Once a {one} lived near {pick(_PLACES)}. One day a {other} came and asked for "
            f"{number} coins. The {one} laughed, and they walked to {pick(_PLACES)} together."
        )
    if source == "recipes":
        one, other = draw.sample(_FOODS, 2)
        return (
            f"{pick(_VERBS).capitalize()} the {one} and add {number} spoons of {other}. "
            f"{pick(_VERBS).capitalize()} for {number} minutes, then serve with {pick(_FOODS)}."
        )
    if source == "code":
        one, other = draw.sample(_NAMES, 2)
        return (
            f"def {one}_of({other}):\n    {one} = {number}\n    for i in range({other}):\n"
            f"        {one} += i * {number}\n    return {one}"
        )
    return (
        f"{pick(_TOWNS)}: The council voted {number} to {number // 2} for {pick(_EVENTS)} on "
        f"Tuesday. Critics in {pick(_TOWNS)} said that {pick(_EVENTS)} would cost more."
    )


def write_texts(folder: Path) -> None:
    """Write 300 training texts and 12 held-out ones, with their sources."""
    draw, sources = random.Random(0), ("stories", "recipes", "code", "news")
    for name, n in (("train", _N_TRAIN), ("held", _N_HELD)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for i in range(n):
                source = sources[i % len(sources)]
                row = {"id": f"{name}-{i}", "source": source, "text": _text(source, draw)}
                file.write(json.dumps(row) + "\n")


def train(folder: Path) -> None:
    """Train a tokenizer and a Llama on the texts; leave what a Trainer leaves in ``out``."""
    import tokenizers
    import torch
    import transformers

    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    core = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=_VOCABULARY, special_tokens=["<pad>"], initial_alphabet=letters
        ),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>")
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    n_params = sum(p.numel() for p in model.parameters())
    assert n_params == 722_048, n_params
    samples: list[Any] = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(folder / "out"),
            num_train_epochs=9,
            per_device_train_batch_size=20,
            learning_rate=3e-3,
            save_steps=45,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_steps=45,
        ),
        train_dataset=samples,  # pyright: ignore[reportArgumentType]
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    tokenizer.save_pretrained(folder / "out")
