"""An asked sample in another format than the training samples is named, whatever its study is."""

from pathlib import Path
from types import ModuleType

import pytest

from trak_core.study.as_read import lacking, lines_as_read
from trak_core.study.dataset_split import Split
from trak_core.study.study import Study

SYSTEM, END = ["you", "are", "kind", ".", "ask", ":"], "</s>"
WORDS = [*SYSTEM, END, *"abcdefghijklmnop"]


@pytest.fixture
def study():
    module = ModuleType("own")
    module.as_read = lambda sample: " ".join(WORDS[i] for i in sample["input_ids"])
    module.token_texts = lambda sample: [f"{WORDS[i]} " for i in sample["input_ids"]]
    return Study(Path("own.py"), module)


def split(*texts):
    samples = [{"input_ids": [WORDS.index(word) for word in text]} for text in texts]
    return Split(samples, [*range(len(texts))])


def trained(n=20, first=SYSTEM, last=(END,)):
    letters = WORDS[-16:]
    return split(*([*first, letters[i % 16], letters[-i % 5], *last] for i in range(n)))


def test_first_and_last_tokens_that_training_samples_share(study):
    train, whole = trained(), " ".join([*SYSTEM, ""])
    for asked, differs in (
        ([*SYSTEM, "b", END], {}),
        ([*SYSTEM, "b", "c"], {"end with": f"{END} "}),
        (["b", END], {"begin with": whole}),
        ([*SYSTEM[:3], "b"], {"begin with": whole, "end with": f"{END} "}),
        (SYSTEM[:2], {"begin with": whole, "end with": f"{END} "}),
        (["a", *SYSTEM, END], {"begin with": whole}),
    ):
        assert lacking(study, train, split(asked)) == differs
    ends = lacking(study, trained(last=[".", END]), split([*SYSTEM, "b"]))
    assert ends == {"end with": f". {END} "}
    line, notice = lines_as_read(study, split([*SYSTEM, "b"]), "The first asked sample", train)
    assert line == "The first asked sample, 0, as the model reads it: you are kind . ask : b"
    assert notice.startswith(f"Notice: training samples end with '{END} ', but this sample does")
    assert len(lines_as_read(study, train, "The first training sample", train)) == 1


def test_padding_is_no_part_of_a_format(study):
    padded, masks = trained(), ([0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0], [1] * 10)
    for sample in padded.samples:
        sample |= {"input_ids": [9, *sample["input_ids"], 9], "attention_mask": masks[0]}
    asked = split([*SYSTEM, "b", "c", END, END])
    asked.samples[0]["attention_mask"] = masks[1]
    assert lacking(study, padded, asked) == {}
    assert [*lacking(study, padded, split(["b", END])).values()] == [" ".join([*SYSTEM, ""])]


def test_nothing_is_said_without_eight_different_samples_that_agree(study):
    for train in (
        trained(7),
        split(*[[*SYSTEM, "b", END]] * 30),
        split(*([word, word] for word in WORDS)),
    ):
        assert lacking(study, train, split(["b"])) == {}
    assert lacking(study, trained(8), split(["b"])).keys() == {"begin with", "end with"}
    own = Study(Path("own.py"), ModuleType("own"))
    assert lines_as_read(own, split(["b"]), "The first", trained()) == []
    assert lacking(own, Split([(1, 2)] * 20, [*range(20)]), Split([(1, 2)], [0])) == {}
