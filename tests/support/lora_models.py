"""Small language models with PEFT's adapters and random weights."""

import warnings

import texts as small
import torch
from peft import LoraConfig, PeftModel, get_peft_model

VOCABULARY, TOKENS = 20, 8


def llama(tied=False):
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return small.llama(vocab_size=VOCABULARY, tie_word_embeddings=tied, **heads)


def gpt2():
    torch.manual_seed(0)
    return small.gpt2(vocab_size=VOCABULARY)


def texts(n, first=0):
    """Return token ids of texts that count upwards, with errors."""
    generator = torch.Generator().manual_seed(first)
    starts = torch.randint(VOCABULARY, (n, 1), generator=generator)
    slips = torch.randint(100, (n, TOKENS), generator=generator) // 80
    return (starts + torch.arange(TOKENS) + slips) % VOCABULARY


def adapted(base, config=None, name="default"):
    """Return a PeftModel, without the warnings of transformers."""
    config = config or LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    with warnings.catch_warnings(action="ignore"):
        return get_peft_model(base, config, adapter_name=name)


def loaded(base, folder, **options):
    """Return the model that peft loads from a folder."""
    with warnings.catch_warnings(action="ignore"):
        return PeftModel.from_pretrained(base, folder, **options).eval()


def train(model, seed=0, steps=3):
    """Train for a few steps, so that no part of an adapter is zero."""
    torch.manual_seed(seed)
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(chosen, 3e-2)
    for _ in range(steps):
        ids = texts(16, seed)
        loss = model.train()(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def save(model, folder, **options):
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(folder, **options)
    return folder
