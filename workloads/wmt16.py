"""WMT16 English to German (paper section 6.4): `translation {de, en}`, with 0, 1 or 5 examples as a shared prefix.

The paper's own instruction and examples are not public; the ones here were written for pagedcli. Their length in
tokens is set to the paper's: 80 with one example, 341 with five.
"""

from __future__ import annotations

from pagedcli.workloads.readers import Format, Record, Row
from pagedcli.workloads.spec import SHOT_TOKENS

_INSTRUCTION = "Translate each English sentence into German. Keep names and numbers as they are.\n"

_EXAMPLES: tuple[tuple[str, str], ...] = (
    ("The library on the corner opens at nine and closes when the last reader has gone home.",
     "Die Bibliothek an der Ecke öffnet um neun und schließt, wenn der letzte Leser nach Hause gegangen ist."),
    ("Our neighbour repaired the old bicycle in a single afternoon and rode it to the lake.",
     "Unser Nachbar reparierte das alte Fahrrad an einem einzigen Nachmittag und fuhr damit zum See."),
    ("Before the meeting began, she wrote three questions on a small piece of paper.",
     "Bevor die Besprechung begann, schrieb sie drei Fragen auf ein kleines Stück Papier."),
    ("The train to the coast was late because snow had covered the signals near the bridge.",
     "Der Zug zur Küste hatte Verspätung, weil Schnee die Signale bei der Brücke bedeckt hatte."),
    ("He planted two apple trees behind the house so that his children would have shade.",
     "Er pflanzte zwei Apfelbäume hinter dem Haus, damit seine Kinder Schatten hätten."),
    ("If the price of flour rises again, the bakery will sell smaller loaves in the spring.",
     "Wenn der Mehlpreis wieder steigt, wird die Bäckerei im Frühjahr kleinere Brote verkaufen."),
    ("The engineers measured the bridge twice and found that it was a hand's width too short.",
     "Die Ingenieure maßen die Brücke zweimal und stellten fest, dass sie eine Handbreit zu kurz war."),
    ("Nobody in the village remembered when the clock in the tower had last shown the right time.",
     "Niemand im Dorf erinnerte sich daran, wann die Uhr im Turm zuletzt die richtige Zeit gezeigt hatte."),
)


def prefix_text(shots: int) -> str:
    """The instruction and the first `shots` example pairs; empty for 0 shots."""
    if not shots:
        return ""
    pairs = "".join(f"English: {en}\nGerman: {de}\n" for en, de in _EXAMPLES[:shots])
    return _INSTRUCTION + pairs


def prefix_tokens(shots: int) -> int:
    """Tokens of the shared prefix: the paper's 80 and 341."""
    return SHOT_TOKENS[shots]


def parse(record: Record) -> Row:
    """One sentence pair: English in, German out."""
    pair = record.get("translation")
    if not isinstance(pair, dict):
        raise record.fault(f"field 'translation' = {type(pair).__name__}: must be an object with 'en' and 'de'")
    inner = Record(f"{record.where}, translation", pair)
    source, target = inner.text("en"), inner.text("de")
    if not source.strip() or not target.strip():
        return Row(record.where, drop="empty sentence")
    return Row(record.where, prompt=source, output=target)


FORMAT = Format("wmt16", "WMT sentence pairs (translation {en, de})", frozenset({"translation"}), "text", parse)
