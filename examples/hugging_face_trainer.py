"""Which texts taught GPT-2 how to continue other texts? A Trainer saved the checkpoints.

This example needs transformers, accelerate and datasets. It can run in any folder, in which it
writes checkpoints to `trainer-out`.
"""

from pydoc_data.topics import topics

import datasets
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from trak_core import Attributor

texts = [" ".join(text.split()) for text in topics["assignment"].split("\n\n")]
end = "<|endoftext|>"
core = Tokenizer(models.BPE())
core.pre_tokenizer = pre_tokenizers.ByteLevel()
core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, special_tokens=[end]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token=end)
data = datasets.Dataset.from_dict({"text": texts})
data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=32))
split = data.train_test_split(4, seed=0)
size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": len(tokenizer)}
trainer = Trainer(
    GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0)),
    TrainingArguments("trainer-out", num_train_epochs=4, save_steps=8, report_to="none"),
    DataCollatorForLanguageModeling(tokenizer, mlm=False),
    split["train"],
)
trainer.train()

# The Trainer's data loader yields the samples as in training: with labels, and without the texts.
attributor = Attributor(trainer.model, "language_modelling", "trainer-out", damping=1)
attributor.fit(trainer.get_eval_dataloader(split["train"]))
top = attributor.score(trainer.get_eval_dataloader(split["test"])).top(1)
for target, train in zip(top["target"], top["train"], strict=True):
    print(f"{split['test'][target]['text'][:70]}\n  <- {split['train'][train]['text'][:70]}")
