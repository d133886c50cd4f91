"""What `ingot inspect` shows of an open artifact, a file for each subject. They import neither torch nor a compiler."""

from ingot.commands.views.choices import choices_json, print_choices
from ingot.commands.views.plan import plan_json, print_plan
from ingot.commands.views.programs import final_texts, print_programs, programs_json, texts_of_pass, texts_of_stage
from ingot.commands.views.regions import print_regions, regions_of
from ingot.commands.views.summary import print_summary, summary
from ingot.commands.views.weights import print_weights, weights_json

__all__ = [
    "choices_json",
    "final_texts",
    "plan_json",
    "print_choices",
    "print_plan",
    "print_programs",
    "print_regions",
    "print_summary",
    "print_weights",
    "programs_json",
    "regions_of",
    "summary",
    "texts_of_pass",
    "texts_of_stage",
    "weights_json",
]
