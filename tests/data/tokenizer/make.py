"""Makes the expected values of the tokenizer tests with Hugging Face's library.

Needs the Python package tokenizers, and bpe.json beside this file, which is
  terrace tokenizer train --vocab-size 450 --output bpe.json training.txt
Writes split.json (variant of bpe.json with a splitting pattern of its own, whole-word matching and
further added tokens), gpt2/ (bpe.json as GPT-2's two files), and cases.json: texts with the words
that GPT-2's pattern makes of them, and the ids by each tokenizer.
"""

import json
import pathlib
import random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

FOLDER = pathlib.Path(__file__).parent
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RANGES = [(0x20, 0x7E), (0x09, 0x0D), (0x80, 0x24F), (0x370, 0x5FF), (0x2000, 0x206F),
          (0x3000, 0x30FF), (0x4E00, 0x4FFF), (0x1F300, 0x1F64F), (0x660, 0x669),
          (0x2150, 0x2190), (0x1D400, 0x1D7FF), (0x00, 0x1F), (0x1680, 0x1680)]
FRAGMENTS = [" ", "  ", "\n", "'s", "'LL", "'ll", "\r\n", "\t", "\u00a0", "\u0085", "\u2028",
             "<|endoftext|>", " the", "12345", "   ", "'", "mill"]


def random_text(length):
    text = ""
    while len(text) < length:
        first, last = random.choice(RANGES)
        text += "".join(chr(random.randint(first, last)) for _ in range(random.randint(1, 5)))
        while random.random() < 0.4:
            text += random.choice(FRAGMENTS)
    return text


def main():
    random.seed(20240601)
    plain = Tokenizer.from_file(str(FOLDER / "bpe.json"))
    document = json.loads(plain.to_str())

    vocabulary = document["model"]["vocab"]
    merges = [merge if isinstance(merge, str) else " ".join(merge)
              for merge in document["model"]["merges"]]
    (FOLDER / "gpt2").mkdir(exist_ok=True)
    (FOLDER / "gpt2" / "vocab.json").write_text(json.dumps(vocabulary) + "\n")
    (FOLDER / "gpt2" / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")

    vocabulary.pop("<|endoftext|>")
    # A word without the merges that would make it: only whole-word matching finds it.
    vocabulary["zyx"] = len(vocabulary)
    split = Tokenizer(models.BPE(
        vocabulary, [tuple(merge.split(" ")) for merge in merges], ignore_merges=True))
    split.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    split.decoder = decoders.ByteLevel()
    split.add_special_tokens(["<|endoftext|>"])
    split.add_tokens([AddedToken("   ", normalized=False), AddedToken("mill", normalized=False),
                      AddedToken("mill's", normalized=False)])
    split.save(str(FOLDER / "split.json"))

    texts = ["", " ", "\n", "a", "The miller's daughter", "don't  stop\n\n  now ", "zyx zyxw xzyx",
             "mill's mills <|endoftext|>the   end<|endoftext|>", "x" * 100, "aaaaaaa", "\0\0a\0",
             (FOLDER / "training.txt").read_text(encoding="utf-8")[:700]]
    texts += [random_text(length) for length in (10, 20, 40, 80, 160, 320, 640)]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cases = []
    for text in texts:
        words = [text[first:last] for _, (first, last) in byte_level.pre_tokenize_str(text)]
        cases.append({"text": text, "words": words, "bpe": plain.encode(text).ids,
                      "split": split.encode(text).ids})
        assert "".join(words) == text
    (FOLDER / "cases.json").write_text(json.dumps(cases) + "\n")


main()
