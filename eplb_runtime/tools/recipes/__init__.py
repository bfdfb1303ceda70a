"""Would a job be balanced? Recipes are read as people write them, and judged by the checks that `attach` makes."""

from .answer import RecipeAnswer, answer, reasons, totals
from .reading import Recipe, RecipeError, read_recipes

__all__ = ["Recipe", "RecipeAnswer", "RecipeError", "answer", "read_recipes", "reasons", "totals"]
