"""How each operator carries labels: moves, ties, contractions, mixes."""

from secateur.channels.rules import contractions, mixes, moves, parts, ties
from secateur.channels.rules.call import UNIFORM, Axis, Call, State
from secateur.channels.rules.registry import RULES, rule

__all__ = ["RULES", "UNIFORM", "Axis", "Call", "State", "contractions", "mixes", "moves", "parts", "rule", "ties"]
