"""Units that answers are given in: lengths, times, money, percent."""

import re
from fractions import Fraction
from typing import NamedTuple


class Unit(NamedTuple):
    """A unit as powers of base units, and its size in them."""

    powers: frozenset[tuple[str, int]]
    size: Fraction


# By base unit: symbols and names that take metric prefixes.
_METRIC = {
    "meter": ("m", "meter metre"),
    "gram": ("g", "gram"),
    "liter": ("l L", "liter litre"),
    "second": ("s", "second"),
    "ampere": ("A", "ampere amp"),
    "kelvin": ("K", "kelvin"),
    "mole": ("mol", "mole"),
    "hertz": ("Hz", "hertz"),
    "newton": ("N", "newton"),
    "pascal": ("Pa", "pascal"),
    "joule": ("J", "joule"),
    "watt": ("W", "watt"),
    "coulomb": ("C", "coulomb"),
    "volt": ("V", "volt"),
    "ohm": ("Ω", "ohm"),
    "electronvolt": ("eV", "electronvolt"),
}
_PREFIXES = {
    ("", ""): "1",
    ("M", "mega"): "1000000",
    ("k", "kilo"): "1000",
    ("d", "deci"): "0.1",
    ("c", "centi"): "0.01",
    ("m", "milli"): "0.001",
    ("μ", "micro"): "0.000001",
    ("n", "nano"): "0.000000001",
}
_VOLUMES = {"liter": "0.001", "gallon": "0.003785411784"}  # in cubic meters
# By base unit: other names, and their size in it. A name in several lines, such as pound, has several units.
_OTHERS = {
    "meter": {"in": "0.0254", "inch": "0.0254", "ft": "0.3048", "foot": "0.3048", "feet": "0.3048", "yd": "0.9144",
              "yard": "0.9144", "mi": "1609.344", "mile": "1609.344"},
    "gram": {"ton": "1000000", "tonne": "1000000", "lb": "453.59237", "pound": "453.59237", "oz": "28.349523125",
             "ounce": "28.349523125"},
    "second": {"sec": "1", "min": "60", "minute": "60", "h": "3600", "hr": "3600", "hour": "3600", "day": "86400",
               "week": "604800"},
    "month": {"month": "1", "year": "12", "yr": "12", "decade": "120", "century": "1200", "centurie": "1200"},
    "gallon": {"gallon": "1", "gal": "1", "quart": "1/4", "pint": "1/8", "cup": "1/16"},
    "USD": {"USD": "1", "dollar": "1", "$": "1", "cent": "0.01", "¢": "0.01"},
    "EUR": {"EUR": "1", "euro": "1", "€": "1"},
    "GBP": {"GBP": "1", "pound": "1", "£": "1", "pence": "0.01"},
    "JPY": {"JPY": "1", "yen": "1", "¥": "1"},
    "INR": {"INR": "1", "rupee": "1", "Rs": "1", "₹": "1"},
    "%": {"%": "1", "percent": "1", "percentage": "1", "pct": "1"},
    "angle": {"degree": "1", "deg": "1"},
    "celsius": {"degree": "1", "deg": "1", "celsius": "1", "C": "1"},
    "fahrenheit": {"degree": "1", "deg": "1", "fahrenheit": "1", "F": "1"},
    "radian": {"radian": "1", "rad": "1"},
    "acre": {"acre": "1"},
}  # fmt: skip
_SHORT = {"mph": "mi/h", "kmph": "km/h", "kph": "km/h", "kmh": "km/h", "sqft": "ft^2"}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_TERM = re.compile(r"([^\W\d_]+|[%$€£¥₹¢])(?:\^\{?(-?\d)\}?)?")
_ONE = Unit(frozenset(), Fraction(1))


def _units() -> dict[str, tuple[Unit, ...]]:
    """The units by name."""
    sizes = [(base, name, size) for base, names in _OTHERS.items() for name, size in names.items()]
    for base, kinds in _METRIC.items():
        for prefixes, size in _PREFIXES.items():
            for prefix, names in zip(prefixes, kinds, strict=True):
                sizes += [(base, prefix + name, size) for name in names.split()]
    units: dict[str, tuple[Unit, ...]] = {}
    for base, name, size in sizes:
        power = ("meter", 3) if base in _VOLUMES else (base, 1)
        unit = Unit(frozenset({power}), Fraction(size) * Fraction(_VOLUMES.get(base, 1)))
        units[name] = (*units.get(name, ()), unit)
    return units


_UNITS = _units()
PERCENT = _UNITS["%"][0]


def read_unit(text: str) -> tuple[Unit, ...]:
    """The units that a text may name, such as "km/h", "square feet" or "miles per hour"; none if it names no unit."""
    text = re.sub(r"\bper\b", "/", _SHORT.get(text, text))
    numerator, *denominators = re.sub(r"\\cdot|[·*.]|(?<=[a-z])-(?=[a-z])", " ", text).split("/")
    units = _product(numerator.split())
    for denominator in denominators:
        divisors = _product(denominator.split())
        units = (_times(units[0], divisors[0], -1),) if units and divisors else ()
    return units


def ratio(units: tuple[Unit, ...], others: tuple[Unit, ...]) -> Fraction | None:
    """The size of one unit in the other; None if they measure different things."""
    sizes = (unit.size / other.size for unit in units for other in others if unit.powers == other.powers)
    return next(sizes, None)


def _product(words: list[str]) -> tuple[Unit, ...]:
    """The units of several words: "square" goes before its unit, "squared" behind it."""
    units: tuple[Unit, ...] = ()
    power = 1
    for word in words:
        if word.lower() in _POWERS and units:
            units = (_times(_ONE, units[0], _POWERS[word.lower()]),)
        elif word.lower() in _POWERS:
            power = _POWERS[word.lower()]
        else:
            match = _TERM.fullmatch(word)
            named = _named(match[1]) if match else ()
            if match is None or not named:
                return ()
            exponent = power * int(match[2] or 1)
            if units or exponent != 1:
                named = (_times(units[0] if units else _ONE, named[0], exponent),)
            units, power = named, 1
    return units


def _named(word: str) -> tuple[Unit, ...]:
    """The units of one word; a symbol of one or two letters has one spelling only."""
    names = [word, word.lower()] if len(word) > 2 else [word]
    names += [name[:-suffix] for name in names if len(name) > 2 for suffix in (1, 2) if name.endswith("es"[-suffix:])]
    return next((_UNITS[name] for name in names if name in _UNITS), ())


def _times(one: Unit, other: Unit, power: int) -> Unit:
    """The product of a unit and a power of another unit."""
    powers = dict(one.powers)
    for base, exponent in other.powers:
        powers[base] = powers.get(base, 0) + power * exponent
    remaining = frozenset((base, exponent) for base, exponent in powers.items() if exponent)
    return Unit(remaining, one.size * other.size**power)
