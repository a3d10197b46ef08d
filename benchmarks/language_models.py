"""Language models of random weights that benchmarks measure.

Nothing but torch and transformers is imported: environments of other packages have them too.
"""

from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 128
# Width, layers, heads, vocabulary, samples a batch.
SIZES = {"7M": (256, 6, 4, 8192, 8), "30M": (512, 8, 8, 8192, 4), "124M": (768, 12, 12, 50257, 2)}
# Width, inner width, layers, heads, heads of keys, vocabulary, samples a batch.
LLAMAS = {
    "llama_2M": (128, 352, 4, 4, 2, 4000, 4),
    "llama_8M": (288, 768, 6, 6, 2, 4000, 4),
    "llama": (384, 1024, 8, 6, 2, 16384, 4),
    "103M": (768, 2048, 12, 12, 12, 12000, 1),
}
# Width, layers, vocabulary, samples a batch.
LSTMS = {
    "lstm_100k": (64, 1, 500, 4),
    "lstm_2M": (256, 2, 2000, 4),
    "lstm_6M": (512, 2, 2000, 4),
    "lstm_21M": (1024, 2, 2000, 4),
}
# Classes of transformers, with vocabulary, samples a batch, and settings.
OTHERS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "mixtral": (
        "MixtralForCausalLM",
        *(1000, 4),
        {
            **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None},
        },
    ),
    "xlnet": ("XLNetLMHeadModel", 500, 4, {"d_model": 64, "n_layer": 2, "n_head": 4}),
    **{
        name: (
            "BigBirdForMaskedLM",
            *(500, 4),
            {
                **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
                **{"intermediate_size": 128, "attention_type": kind, "block_size": 16},
                **{"num_random_blocks": 2, "max_position_embeddings": 512},
            },
        )
        for name, kind in {"big_bird": "original_full", "big_bird_sparse": "block_sparse"}.items()
    },
}


class RecurrentModel(nn.Module):
    """Embeddings, LSTM layers, and a linear layer to logits."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        """Keep the sizes."""
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return logits, shape (batch, tokens, vocabulary)."""
        return {"logits": self.head(self.lstm(self.embeddings(input_ids))[0])}


def language_model(
    name: str, n_samples: int | None = None, n_tokens: int = TOKENS
) -> tuple[nn.Module, Tensor]:
    """Return a model of random weights and a batch of tokens, shape (samples, n_tokens).

    Args:
        name: A key of one of the tables above.
        n_samples: Texts of the batch; None for the model's own number.
        n_tokens: At most ``TOKENS`` for GPT-2 and Llama.
    """
    import transformers
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
    elif name in LSTMS:
        width, layers, vocabulary, usual = LSTMS[name]
        model = RecurrentModel(width, layers, vocabulary)
    elif name in OTHERS:
        kind, vocabulary, usual, settings = OTHERS[name]
        made = getattr(transformers, kind)
        model = made(made.config_class(vocab_size=vocabulary, **settings))
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
