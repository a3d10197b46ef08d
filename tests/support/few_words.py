"""A tokenizer of a few words, and files of rows, for studies of texts."""

import json

WORDS = [
    *("what", "is", "red", "the", "sky", "blue"),
    *("grass", "green", "sun", "user", "said", "asked"),
]
CHAT = (
    "{% for m in messages %}{{ m['role'] }} said {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}user said {% endif %}"
)


def tokenizer():
    # Not at the top: rows are written where transformers is not installed as well.
    import tokenizers
    from transformers import PreTrainedTokenizerFast as Tokenizer

    words = {word: number for number, word in enumerate(["?", *WORDS])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = Tokenizer(tokenizer_object=core, unk_token="?", pad_token="?")
    made.chat_template = CHAT
    return made


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def adapter(folder, base):
    """Write the settings of an adapter that is not trained yet, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
    settings |= {"base_model_name_or_path": base, "task_type": "CAUSAL_LM", "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def ids(text):
    return [1 + WORDS.index(word) for word in text.split()]
