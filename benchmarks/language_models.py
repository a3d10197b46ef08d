"""Language models that benchmarks measure: of random weights, the shapes of GPT-2 and of Llama.

Nothing but torch and transformers is imported: environments of other packages have them too.
"""

from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 128
# Width, layers, heads, vocabulary, samples a batch.
SIZES = {"7M": (256, 6, 4, 8192, 8), "30M": (512, 8, 8, 8192, 4), "124M": (768, 12, 12, 50257, 2)}
# Width, inner width, layers, heads, heads of keys, vocabulary, samples a batch.
LLAMAS = {"llama": (384, 1024, 8, 6, 2, 16384, 4), "103M": (768, 2048, 12, 12, 12, 12000, 1)}


def language_model(
    name: str, n_samples: int | None = None, n_tokens: int = TOKENS
) -> tuple[nn.Module, Tensor]:
    """Return a GPT-2 or Llama of random weights and a batch of tokens, shape (samples, n_tokens).

    Args:
        name: One of ``SIZES`` or ``LLAMAS``.
        n_samples: Texts of the batch; None for the model's own number.
        n_tokens: At most ``TOKENS``.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    quiet: dict[str, Any] = {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
    if name in LLAMAS:
        width, inner, layers, heads, key_heads, vocabulary, usual = LLAMAS[name]
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            vocab_size=vocabulary,
            max_position_embeddings=TOKENS,
            pad_token_id=None,
            **quiet,
        )
        model = LlamaForCausalLM(config)
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
    return model, torch.randint(0, vocabulary, (n_samples or usual, n_tokens))
