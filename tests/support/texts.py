"""Texts of different lengths, and small language models for them; a study's code as well."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCABULARY, POSITIONS = 40, 30
NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
CAUSAL = {"vocab_size": VOCABULARY, "loss_type": "ForCausalLM", **NO_IDS}
SIZE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}

STUDY = """
import texts

def make_model():
    return texts.{make}()

def train_data():
    return texts.data({n_train}, 0, {keys})

def train_ids():
    return [f"text-{{i}}" for i in range({n_train})]

def target_data():
    return texts.data(7, 1, {keys})
"""


class Plain(nn.Module):
    """A model with causal attention of its own that takes tokens alone."""

    def __init__(self, causal=True):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 12)
        self.qkv, self.head = nn.Linear(12, 36), nn.Linear(12, VOCABULARY)
        self.causal = causal

    def forward(self, input_ids):
        x = self.tokens(input_ids)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        mixed = nn.functional.scaled_dot_product_attention(3 * q, k, v, is_causal=self.causal)
        return self.head(x + mixed)


def plain():
    return Plain()


def looks_ahead():
    return Plain(causal=False)


def gpt2(**settings):
    size = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS}
    return GPT2LMHeadModel(GPT2Config(**size | CAUSAL | settings))


def llama(**settings):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**SIZE | heads | CAUSAL | settings))


def bert():
    """A model whose tokens see those that follow: right with a mask alone."""
    heads = {"num_attention_heads": 2, "max_position_embeddings": POSITIONS}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **SIZE, **heads))


SOURCE = {"vocab_size": VOCABULARY, "pad_token_id": 0, "decoder_start_token_id": 0}


def t5():
    size = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**SOURCE, **size))


def bart():
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 16}
    ends = {"bos_token_id": 1, "eos_token_id": 1, "forced_eos_token_id": None}
    positions = {"max_position_embeddings": POSITIONS}
    return BartForConditionalGeneration(BartConfig(**SOURCE, **sizes, **heads, **ends, **positions))


def prompted():
    """A frozen model with three virtual tokens before each text."""
    from peft import PromptTuningConfig, get_peft_model

    return get_peft_model(gpt2(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def data(n, seed, keys=()):
    """Samples of at most 30 tokens, the third the longest; with more inputs if asked for."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, POSITIONS, (n,), generator=generator).tolist()
    lengths[2] = POSITIONS
    samples = []
    for length in lengths:
        tokens = torch.randint(1, VOCABULARY, (length,), generator=generator)
        labels = tokens.clone()
        labels[0] = -100  # which counts for nothing anyway
        more = {
            "attention_mask": torch.ones(length, dtype=torch.int64),
            "position_ids": torch.arange(length),
        }
        samples.append({"input_ids": tokens, **{key: more[key] for key in keys}, "labels": labels})
    return samples


def f_of(model, sample):
    """f of one text as it is, by its definition, with a graph."""
    inputs = {name: tensor[None] for name, tensor in sample.items() if name != "labels"}
    returned = model(**inputs)
    logits = returned if isinstance(returned, torch.Tensor) else returned.logits
    p = torch.exp(-cross_entropy(logits[0, :-1], sample["labels"][1:], reduction="sum"))
    return torch.log(p) - torch.log1p(-p)


def gradients(model, samples):
    """f and its gradients (n, p), one text and one backward pass at a time, in float64."""
    model = model.double().eval()
    outputs = [f_of(model, sample) for sample in samples]
    rows = [torch.autograd.grad(f, list(model.parameters())) for f in outputs]
    rows = [torch.cat([g.flatten() for g in row]) for row in rows]
    return torch.stack(outputs).detach().numpy(), torch.stack(rows).numpy()
