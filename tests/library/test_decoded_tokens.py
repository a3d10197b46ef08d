"""The text that each token adds, for several kinds of tokenizers."""

import pytest

from trak_core.ready_made.ready_study import decoded_tokens

transformers = pytest.importorskip("transformers", reason="with the extra `test`")
few_words = pytest.importorskip("few_words")


def tokenizer_of(kind):
    tokenizers = pytest.importorskip("tokenizers", reason="with the extra `test`")
    models, decoders, before = tokenizers.models, tokenizers.decoders, tokenizers.pre_tokenizers
    if kind == "words":
        return few_words.tokenizer()
    if kind == "pieces":  # BERT's
        words = ["[UNK]", "the", "sky", "vot", "##ing", "don", "'", "t", "."]
        made = models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
        splits, decoder = before.BertPreTokenizer(), decoders.WordPiece()
    elif kind == "bytes":  # GPT-2's
        merges = [("Ġ", "t"), ("s", "k"), ("sk", "y"), ("ð", "Ł")]
        words = [*sorted(before.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
        made = models.BPE({token: i for i, token in enumerate(words)}, merges)
        splits, decoder = before.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    else:  # Llama's
        words = ["<unk>", "▁the", "▁sky", "▁", "vot", "ing", *(f"<0x{i:02X}>" for i in range(256))]
        made = models.Unigram([(word, -1.0) for word in words], 0, True)
        steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
        decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        splits = before.Metaspace()
    core = tokenizers.Tokenizer(made)
    core.pre_tokenizer, core.decoder = splits, decoder
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core)


SHOWN = {
    "words": ("the sky is", ["the", " sky", " is"]),
    "pieces": ("the voting sky.", ["the", " vot", "ing", " sky", "."]),
    "bytes": ("sky the 🌍", ["sky", " t", "h", "e", " ", "", "", "🌍"]),
    "spaces": ("the sky é voting", ["the", " sky", " ", "", "é", " ", "vot", "ing"]),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_tokens_show_what_they_add_to_the_text(kind):
    tokenizer = tokenizer_of(kind)
    text, shown = SHOWN[kind]
    assert decoded_tokens(tokenizer, tokenizer(text)["input_ids"]) == shown
    # A text cut within a character, and one with the replacement character.
    rest = {"bytes": "\N{REPLACEMENT CHARACTER} sky 🌍🌍", "pieces": "don't . the"}.get(kind, text)
    given = tokenizer(rest)["input_ids"]
    for n in range(len(given) + 1):
        texts = decoded_tokens(tokenizer, given[:n])
        whole = tokenizer.decode(given[:n], clean_up_tokenization_spaces=False)
        assert (len(texts), "".join(texts)) == (n, whole)
