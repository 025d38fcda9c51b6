"""Invented names of the synthetic world: fixed pools, so that a vocabulary built from them never changes."""


def _combine(stems: str, endings: str) -> tuple[str, ...]:
    return tuple(stem + ending for stem in stems.split() for ending in endings.split())


COUNTRIES = _combine("Val Kor Bel Tas Mor Ner Zan Ith", "doria venia landia mark istan")  # 40
CITIES = _combine("Bren Dun Hal Kess Lor Mar Ost Pel Thorn Wick", "avik ogrod imar enfal urst olmo")  # 60

# The objects of each relation: a few more than cities, so that a single redrawn fact always has another value to take.
OBJECTS = {
    "river": _combine("Ash Cal Eld Fen Gil Ir Lum Oss Rav Sil Ven", "awen ewe ilka ona umba yra"),  # 66
    "founder": _combine("Adal Bor Cas Dom Ez Far Gor Hed Jan Lev Rod", "ric wyn mund bert ella issa"),  # 66
    "language": _combine("Arn Bal Cor Dar Fal Hur Jut Kel Nor Quen Syl", "adic enese ish ogan uvian yric"),  # 66
}
RELATIONS = tuple(OBJECTS)

ALL_NAMES = (*COUNTRIES, *CITIES, *(name for pool in OBJECTS.values() for name in pool))
