"""A byte-level tokenizer of 320 tokens, trained on a few lines, as a tokenizer.json would hold it."""

from __future__ import annotations

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Pieces

CORPUS = [
    "the cat sat on the mat, and the dog sat by it; 123 45",
    "def f(x):\n    return x + 1\n\n",
    "naïve café über 日本",
]
SPECIALS = ["<|start|>", "<|im_end|>", "<|end|>"]


def byte_level() -> Pieces:
    pieces = Pieces(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    pieces.normalizer = normalizers.NFC()
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces.train_from_iterator(CORPUS, trainer)
    pieces.post_processor = processors.TemplateProcessing("<|start|> $A", special_tokens=[("<|start|>", 0)])
    return pieces
