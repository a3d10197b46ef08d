"""Language models that benchmarks measure: of random weights, the shapes of GPT-2 and of Llama.

Nothing but torch and transformers is imported: environments of other packages have them too.
"""

from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 128
# Width, layers, heads, vocabulary, samples a batch.
SIZES = {"7M": (256, 6, 4, 8192, 8), "30M": (512, 8, 8, 8192, 4), "124M": (768, 12, 12, 50257, 2)}


def language_model(name: str, n_samples: int | None = None) -> tuple[nn.Module, Tensor]:
    """Return a GPT-2 or Llama of random weights and a batch of tokens, shape (samples, TOKENS).

    Args:
        name: One of ``SIZES``, or "llama".
        n_samples: Texts of the batch; None for the model's own number.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    quiet: dict[str, Any] = {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
    if name == "llama":
        config = LlamaConfig(
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=2,
            vocab_size=16384,
            max_position_embeddings=TOKENS,
            pad_token_id=None,
            **quiet,
        )
        model = LlamaForCausalLM(config)
        vocabulary, usual = 16384, 4
    else:
        width, layers, heads, vocabulary, usual = SIZES[name]
        config = GPT2Config(
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            n_positions=TOKENS,
            vocab_size=vocabulary,
            **quiet,
        )
        config.loss_type = "ForCausalLM"  # which it takes, with a warning, if nobody says
        model = GPT2LMHeadModel(config)
    return model, torch.randint(0, vocabulary, (n_samples or usual, TOKENS))
