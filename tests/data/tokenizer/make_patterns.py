"""Makes the expected words of the splitting pattern tests with Hugging Face's library.

Needs the Python package tokenizers (made with 0.23.3). Writes patterns.json: patterns of well-known
tokenizers and others of their dialect, and the words that they make of texts. Characters that are
unassigned in Unicode 14 are left out, since libraries class them differently.
"""

import json
import pathlib
import random
import unicodedata

from tokenizers import Regex, pre_tokenizers

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
REST = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NO_HAN = r"&&[^\p{Han}]"


def cased(upper, lower):
    return (rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]*[{lower}]+{CONTRACTIONS}?|"
            rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]+[{lower}]*{CONTRACTIONS}?|")


PATTERNS = {
    "gpt2": [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    "llama3": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
               r"|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "qwen2": [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
              r"|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "cl100k": [r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
               r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"],
    "o200k": [cased(UPPER, LOWER) + REST],
    "kimi": [r"[\p{Han}]+|" + cased(UPPER + NO_HAN, LOWER + NO_HAN) + REST],
    "deepseek3": [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
                  r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
                  r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "words": [r"\w+|\W+"], "words in a class": [r"[\w]+|[\W]+"], "boundary": [r"\b"],
    "space": [r"\s+|\S+"], "hexadecimal": [r"\h+"], "line start": [r"^."], "line end": [r".$"],
    "text start": [r"\A.|.\z"], "before the last newline": [r".\Z"], "newlines": [r"\R"],
    "dot": [r".+"], "dot and newlines": [r"(?m:.+)"], "options to the end": [r"a(?i)b|c"],
    "fixed": [r"\p{L}{2}?"], "possessive interval": [r"\p{L}{1,2}+"], "no more than": [r"a{,2}b"],
    "nested": [r"[\p{N}[a-c]]+"], "intersections": [r"[\p{L}&&[^a-m]&&[^\p{Lu}]]+"],
    "posix": [r"[[:space:][:^ascii:]]+"], "negated": [r"\p{^L}+|\P{^N}+"], "look-behind": [r"(?<=a|'s)."],
    "code points": [r"[\u4e00-\x{9fa5}\x41]+"], "long s": [r"(?i:[sk]+)"], "empty": [r"x*"],
    "names": [r"\p{uppercase letter}|\p{greek}+|\p{Other_Punctuation}"], "atomic": [r"(?>a|ab)c|b"],
}
FRAGMENTS = [" ", "  ", "\n", "\r\n", "\r", "\n\n", "'s", "'LL", "'\u017f", "\t", "\u00a0", "\u0085",
             "\u2028", "\u180e", "12345", "\u00b2\u00bd", "a\u0301", "字。", "ab", "abc", "Straße",
             "\u212a", "ΣΑΣ", "か゛ー", "!?/", "x_y", "-", "\u0661\u0662", "HTTPServer", "'", "\u200d"]
RANGES = [(0x20, 0x7E), (0x09, 0x0D), (0x80, 0x24F), (0x300, 0x5FF), (0x900, 0x97F),
          (0x1800, 0x180F), (0x2000, 0x206F), (0x3000, 0x30FF), (0x4E00, 0x4E1F),
          (0x1D400, 0x1D433), (0x1F600, 0x1F64F)]


def random_text(length):
    text = ""
    while len(text) < length:
        first, last = random.choice(RANGES)
        text += chr(random.randint(first, last)) if random.random() < 0.4 else random.choice(FRAGMENTS)
    return "".join(c for c in text if unicodedata.category(c) not in ("Cn", "Cs"))


def main():
    random.seed(20240701)
    texts = ["".join(FRAGMENTS), "The miller's WORK isn't\n\n done 字字 ab c.  "]
    texts += [random_text(length) for length in (20, 40, 80, 160)]
    cases = []
    for name, patterns in PATTERNS.items():
        splitter = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])
        for text in texts:
            words = [text[first:last] for _, (first, last) in splitter.pre_tokenize_str(text)]
            assert "".join(words) == text
            cases.append({"name": name, "patterns": patterns, "words": words})
    path = pathlib.Path(__file__).parent / "patterns.json"
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


main()
