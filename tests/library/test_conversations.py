"""Conversations are written by the chat template, with all that a row gives it, or refused."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from refused import refused

from trak_core.data.row_files import read_rows
from trak_core.ready_made.conversations import chat_texts, messages_in
from trak_core.ready_made.language_model import language_model
from trak_core.ready_made.ready_study import decoded_tokens
from trak_core.ready_made.text_classification import text_classification

transformers = pytest.importorskip("transformers", reason="with the extra `test`")
tokenizers = pytest.importorskip("tokenizers")
few_words, small = pytest.importorskip("few_words"), pytest.importorskip("texts")
ids, tokenizer, write = few_words.ids, few_words.tokenizer, few_words.write

USER, ANSWER = ({"role": role, "content": "x"} for role in ("user", "assistant"))
# A template as chat models have it: each message by its role, and a header before the answer.
ROLES = (
    "{% for m in messages %}{{ 'asked ' if m.role == 'user' else 'said ' }}{{ m.content }} "
    "{% endfor %}{% if add_generation_prompt %}said {% endif %}"
)
TOOLS = "{% for t in tools or [] %}{{ t.name }} {% endfor %}" + ROLES
KWARGS = "{{ greeting | default('the') }} " + ROLES
DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ date_string }} " + ROLES
)


@pytest.fixture
def folder(here):

    def saved(template, **special):
        small.gpt2().save_pretrained(here / "out")
        made = tokenizer()
        made.chat_template = template
        made.add_special_tokens(special)
        made.save_pretrained(here / "out")
        return str(here / "out")

    return saved


def chat(*contents):
    roles = ["user", "assistant"] * len(contents)
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def as_read(row, weights, **arguments):
    """Return the tokens of a row, and the part that counts."""
    (sample,) = language_model(write(Path("rows.jsonl"), [row]), weights, **arguments).train_data()
    counted = sample["labels"]
    assert torch.equal(counted[counted != -100], sample["input_ids"][counted != -100])
    return sample["input_ids"].tolist(), counted[counted != -100].tolist()


TURNS = chat("what is blue", "sky")
WRITTEN = ids("asked what is blue said sky"), ids("sky")


@pytest.mark.parametrize(
    ("row", "arguments"),
    [
        ({"messages": TURNS}, {}),
        ({"messages": json.dumps(TURNS)}, {}),
        ({"messages": json.dumps(TURNS, indent=2)}, {}),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, {}),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, {"text": "{completion}"}),
        ({"a": TURNS[:1], "b": TURNS[1:]}, {"prompt": "{a}", "text": "{b}"}),
        ({"prompt": json.dumps(TURNS[:1]), "completion": json.dumps(TURNS[1:])}, {}),
        ({"prompt": TURNS[:1], "text": TURNS[1:]}, {}),
        ({"talk": TURNS}, {"text": "{talk}"}),
        ({"messages": TURNS, "text": "sky"}, {"text": "{messages}"}),
        ({"messages": [{**m, "tool_calls": None} for m in TURNS]}, {}),
        ({"messages": TURNS, "prompt": "what is blue", "completion": None}, {}),
    ],
)
def test_each_form_of_a_conversation_is_written_by_the_template(folder, row, arguments):
    """As messages, as TRL's prompt and completion, by names of fields, and as JSON in a cell."""
    assert as_read(row, folder(ROLES), **arguments) == WRITTEN


@pytest.mark.parametrize(
    ("template", "more", "first"),
    [
        (TOOLS, {"tools": [{"name": "sun"}, {"name": "red"}]}, "sun red"),
        (TOOLS, {"tools": json.dumps([{"name": "sun"}])}, "sun"),
        (TOOLS, {"tools": None}, ""),
        (KWARGS, {"chat_template_kwargs": {"greeting": "red"}}, "red"),
        (KWARGS, {"chat_template_kwargs": json.dumps({"greeting": "green"})}, "green"),
        (KWARGS, {}, "the"),
        (KWARGS, {"greeting": "red"}, "the"),  # a column of the user's own
        (DATED, {"chat_template_kwargs": {"date_string": "sun"}}, "sun"),
    ],
)
def test_a_row_s_arguments_reach_the_template(folder, template, more, first):
    for row in ({"messages": TURNS}, {"prompt": TURNS[:1], "completion": TURNS[1:]}):
        tokens, counted = as_read({**row, **more}, folder(template))
        assert tokens == [*ids(first), *WRITTEN[0]]
        assert counted == WRITTEN[1]


# Conversations without an answer at the end: a "thanks", and others.
UNANSWERED = {
    "user, assistant, user": [USER, ANSWER, USER],
    "user": [USER],
    "assistant": [ANSWER],
    "system, user": [{"role": "system", "content": "x"}, USER],
    "user, tool": [USER, {"role": "tool", "content": "x"}],
}
NO_LISTS = ("[", "text", [], [1], [{"content": "x"}], {}, "[1]", 3)


@pytest.mark.parametrize(
    ("row", "code", "values"),
    [
        *(({"messages": own}, "chat_roles", [roles]) for roles, own in UNANSWERED.items()),
        *(
            ({"prompt": own[:-1], "completion": own[-1:]}, "chat_roles", [])
            for own in UNANSWERED.values()
        ),
        *(({"messages": value}, "messages", ["conversation is empty"]) for value in NO_LISTS),
        ({"messages": TURNS, "text": "sky"}, "messages", ["text"]),
        ({"messages": TURNS, "prompt": "the sun"}, "two_texts", ["prompt"]),
        ({"messages": TURNS, "completion": "sun"}, "two_texts", ["completion"]),
        ({"prompt": "sky", "completion": "blue", "text": "sky blue"}, "two_texts", ["completion"]),
        ({"messages": [{"role": "user", "text": "sky"}, TURNS[1]]}, "messages", ["role, text"]),
        ({"messages": [{**TURNS[0], "content": None}, TURNS[1]]}, "messages", ["user"]),
        ({"messages": [{**TURNS[0], "content": ["sky"]}, TURNS[1]]}, "messages", ["['sky']"]),
        ({"prompt": "what is blue", "completion": TURNS[1:]}, "chat_roles", []),
        ({"prompt": TURNS[:1], "completion": "sky"}, "chat_roles", []),
        ({"completion": TURNS[1:]}, "chat_roles", []),
        ({"messages": TURNS, "tools": "the sun"}, "messages", ["tools", "'the sun'"]),
        ({"messages": TURNS, "chat_template_kwargs": [1]}, "messages", ["dict", "[1]"]),
    ],
)
def test_messages_and_texts_that_the_model_would_not_read_are_refused(folder, row, code, values):
    with refused(f"studies.{code}", "rows.jsonl, line 1", *values):
        as_read(row, folder(ROLES))


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "saved", "text in parquet"])
def test_null_is_passed_on_unless_a_table_added_it(folder, kind):
    """Parquet and saved data sets cannot say which keys were null, and which were missing."""
    calls = [{"name": "f", "arguments": {"city": "Oslo", "content": None, "day": None}}]
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    row = {"messages": [{**USER, "tool_calls": None}, answer]}
    row["tools"] = [{"name": "f", "parameters": {"day": {"default": None, "enum": ["c", None]}}}]
    texts = {name: json.dumps(value) for name, value in row.items()}
    files = {
        "jsonl": json.dumps(row),
        "json": json.dumps([row], indent=1),
        "csv": pd.DataFrame([texts]).to_csv(index=False),
    }
    file = Path(f"rows.{kind.split()[-1]}")
    if kind == "saved":
        pytest.importorskip("datasets").Dataset.from_list([row]).save_to_disk(file)
    elif kind in files:
        file.write_text(files[kind])
    else:
        pytest.importorskip("pyarrow")
        pd.DataFrame([texts if "text" in kind else row]).to_parquet(file)
    if kind in {"saved", "parquet"}:
        del calls[0]["arguments"]["content"], calls[0]["arguments"]["day"]
        del row["tools"][0]["parameters"]["day"]["default"]
    weights = folder(
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }} "
        "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %} {% endfor %}"
    )
    made = transformers.AutoTokenizer.from_pretrained(weights)
    (given,) = read_rows(file)
    *prompt, last = messages_in(given["messages"]) or []
    told: list[str] = []
    _, whole = chat_texts(made, prompt, [last], given, None, told.append)
    assert "null" in "".join(told)
    assert whole == made.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)


def test_a_message_that_the_template_leaves_out_is_reported(folder, capsys):
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "red"}]}
    as_read({"messages": [TURNS[0], calls, *TURNS]}, folder(ROLES))
    assert "the chat template omits" not in capsys.readouterr().err
    system = {"role": "system", "content": "red"}
    without = ROLES.replace("in messages %}", "in messages if m.role != 'system' %}")
    as_read({"messages": [system, *TURNS]}, folder(without))
    said = "the chat template omits or changes the content of a message with the role 'system'"
    assert f"Notice: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "arguments", "is_told"),
    [
        ({"messages": TURNS * 2}, {}, True),
        ({"talk": TURNS * 2}, {"text": "{talk}"}, True),
        ({"messages": json.dumps(TURNS * 2)}, {}, True),
        ({"messages": TURNS}, {}, False),
        ({"prompt": (TURNS * 2)[:3], "completion": TURNS[1:]}, {}, False),
        ({"prompt": "what", "text": " sky"}, {}, False),
    ],
)
def test_earlier_messages_of_the_assistant_are_told_of(folder, capsys, row, arguments, is_told):
    """Only the last message is explained, but training often counts all of the assistant's."""
    as_read(row, folder(ROLES), **arguments)
    said = "1 of 1 training rows have earlier messages of the assistant. The first is rows.jsonl"
    assert (said in capsys.readouterr().err) is is_told


def test_rows_without_the_prompt_that_others_have_are_told_of(folder, capsys):
    rows = [{"prompt": "what", "text": " sky"}, {"text": "blue sky"}]
    study = language_model(write(Path("rows.jsonl"), rows), folder(ROLES))
    study.train_data()
    said = (
        "1 of 2 training rows have no prompt, unlike other rows. The first is rows.jsonl, line 2."
    )
    assert said in capsys.readouterr().err
    study.encode(text="sky")
    assert "a row to explain has no prompt, unlike training rows" in capsys.readouterr().err
    study.encode(**rows[0])
    language_model(write(Path("rows.jsonl"), rows[1:]), folder(ROLES)).train_data()
    assert "no prompt" not in capsys.readouterr().err


SPLIT = {"prompt": TURNS[:1], "completion": TURNS[1:]}


@pytest.mark.parametrize(
    ("row", "arguments", "asked", "is_told"),
    [
        ({"messages": TURNS}, {}, {"text": "sky"}, True),
        ({"messages": TURNS}, {}, {"prompt": "what is blue", "completion": " sky"}, True),
        ({"messages": TURNS}, {}, {"messages": TURNS}, False),
        ({"messages": TURNS}, {}, SPLIT, False),
        ({"talk": TURNS}, {"text": "{talk}"}, {"text": "sky"}, True),
        ({"talk": TURNS}, {"text": "{talk}"}, {"talk": json.dumps(TURNS)}, False),
        (SPLIT, {}, {"prompt": "", "text": "sky"}, True),
        (SPLIT, {}, {"messages": TURNS}, False),
        ({"text": "sky"}, {}, {"text": "sky"}, False),
    ],
)
def test_asked_rows_of_another_form(folder, capsys, row, arguments, asked, is_told):
    """A plain text is not written by the chat template, unlike all training rows."""
    study = language_model(write(Path("rows.jsonl"), [row]), folder(ROLES), **arguments)
    read = study.encode(**asked)["input_ids"].tolist()
    assert (read == WRITTEN[0]) is not (is_told or "text" in row)
    said = 'such as {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", '
    assert (said in capsys.readouterr().err) is is_told


def test_rows_of_both_kinds_are_each_read_as_theirs(folder):
    """Parquet fills in the messages of a row of text with None."""
    weights = folder(ROLES)
    assert as_read({"messages": None, "text": "sky"}, weights) == (ids("sky"), ids("sky"))
    assert as_read({"prompt": 0, "text": " sky"}, weights)[1] == ids("sky")
    for prompt in (False, [], {}, ["what"]):
        with refused("studies.value", "prompt"):
            as_read({"prompt": prompt, "text": "sky"}, weights)


def test_a_template_that_is_missing_or_refuses_is_told_of(folder):
    with refused("studies.chat_template"):
        weights = folder(ROLES)
        made = transformers.AutoTokenizer.from_pretrained(weights)
        made.chat_template = None
        made.save_pretrained(weights)
        (Path(weights) / "chat_template.jinja").unlink(missing_ok=True)
        as_read({"messages": TURNS}, weights)
    with refused("studies.chat_template", "user comes first"):
        as_read({"messages": TURNS}, folder("{{ raise_exception('user comes first') }}"))
    other = ROLES.replace("said {% endif %}", "sun {% endif %}")
    with refused("studies.chat_template", "'asked what is blue sun '"):
        as_read({"messages": TURNS}, folder(other))


# Calls of transformers' function whose result a given date can replace, and others.
REPLACED = [
    DATED,
    "{{ strftime_now('%d %b %Y') }} " + ROLES,
    '{{ strftime_now ( "%A" ) }} ' + ROLES,
]
COMPUTED = [
    *("{% set f = '%Y' %}{{ strftime_now(f) }} ", "{{ strftime_now(format='%Y') }} "),
    *("{% set now = strftime_now %}{{ now('%Y') }} ", "{{ strftime_now('%Y' + '-%m') }} "),
]


@pytest.mark.parametrize("template", [*REPLACED, *(call + ROLES for call in COMPUTED)])
def test_no_template_writes_today_s_date(folder, template):
    weights, given = folder(template), {"date": "2024-07-26"}
    with refused("studies.chat_date", "2024-07-26"):
        as_read({"messages": TURNS}, weights)
    with refused("studies.chat_date", "26 July"):
        as_read({"messages": TURNS}, weights, date="26 July")
    if template in REPLACED:
        assert len(as_read({"messages": TURNS}, weights, **given)[0]) > len(WRITTEN[0])
    else:
        with refused("studies.chat_date", "strftime_now"):
            as_read({"messages": TURNS}, weights, **given)


@pytest.mark.parametrize("text", ["red sky is", "sky is", "red red sky"])
def test_a_text_has_the_first_token_of_texts_once(folder, text):
    """The tokenizer adds it, and rows that a template wrote before have it already."""
    weights = folder(ROLES, bos_token="red")
    made = transformers.AutoTokenizer.from_pretrained(weights)
    first = {"single": "red $A", "special_tokens": [("red", ids("red")[0])]}
    made.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(**first)
    made.save_pretrained(weights)
    once = text if text.startswith("red") else f"red {text}"
    assert as_read({"text": text}, weights)[0] == ids(once)
    prompted = as_read({"prompt": f"{text} ", "text": "blue"}, weights)
    assert prompted == ([*ids(once), *ids("blue")], ids("blue"))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_text_beyond_the_model_s_context_is_refused_at_once(folder, place):
    rows = [{"text": "sky"}] * 3
    rows[place] = {"text": "sky " * (small.POSITIONS + 1)}
    weights, file = folder(ROLES), write(Path("rows.jsonl"), rows)
    with refused("studies.context", small.POSITIONS, f"rows.jsonl, line {place + 1}", "max_tokens"):
        language_model(file, weights).train_data()
    cut = language_model(file, weights, max_tokens=small.POSITIONS).train_data()
    assert len(cut[place]["input_ids"]) == small.POSITIONS
    whole = language_model(file, weights, max_tokens=small.POSITIONS + 1).train_data()
    assert len(whole[place]["input_ids"]) == small.POSITIONS + 1


@pytest.mark.parametrize(
    ("row", "max_tokens"),
    [
        ({"text": ""}, None),
        ({"prompt": "what is", "text": ""}, None),
        ({"prompt": "what is", "text": " red"}, 2),
    ],
)
def test_a_text_of_which_nothing_counts_is_refused_with_its_line(folder, row, max_tokens):
    with refused("studies.empty_text", "rows.jsonl, line 1", "max_tokens"):
        as_read(row, folder(ROLES), max_tokens=max_tokens)


def test_tokenizers_that_cannot_serve_are_refused(folder, tmp_path):
    weights, file = folder(ROLES), write(tmp_path / "rows.jsonl", [{"text": "sky", "label": 0}])
    transformers.ByT5Tokenizer().save_pretrained(weights)
    for leftover in ("tokenizer.json", "chat_template.jinja"):
        (tmp_path / "out" / leftover).unlink(missing_ok=True)
    with refused("studies.slow_tokenizer", "ByT5Tokenizer"):
        language_model(file, weights)
    made = tokenizer()
    made.pad_token = None
    made.save_pretrained(weights)
    with refused("studies.pad_token", weights):
        text_classification(file, weights)


def test_what_the_model_reads_is_shown_with_its_special_tokens(folder, tmp_path):
    weights = folder(ROLES, eos_token="sun")
    study = language_model(
        write(tmp_path / "a.jsonl", [{"prompt": "what is ", "text": "red sun"}]), weights
    )
    assert study.as_read(study.train_data()[0]) == "'what is', then the text to explain: 'red sun'"
    assert study.describe(study.train_data()[0]) == "prompt: what is\nanswer: red"


def tokenizer_of(kind):
    models, decoders, before = tokenizers.models, tokenizers.decoders, tokenizers.pre_tokenizers
    if kind == "words":
        return tokenizer()
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
    made = tokenizer_of(kind)
    text, shown = SHOWN[kind]
    assert decoded_tokens(made, made(text)["input_ids"]) == shown
    # A text cut within a character, and one with the replacement character.
    rest = {"bytes": "\N{REPLACEMENT CHARACTER} sky 🌍🌍", "pieces": "don't . the"}.get(kind, text)
    given = made(rest)["input_ids"]
    for n in range(len(given) + 1):
        texts = decoded_tokens(made, given[:n])
        whole = made.decode(given[:n], clean_up_tokenization_spaces=False)
        assert (len(texts), "".join(texts)) == (n, whole)
