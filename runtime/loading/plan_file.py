"""Reading of plan.json, which has the plans of all ranks."""

from pydantic import ValidationError

from ingot.ir.artifact.plan import PLAN_FILE, PlanFile
from ingot.runtime.loading.artifact import Artifact, malformed


def read_plan_file(artifact: Artifact) -> PlanFile:
    """Return the content of an artifact's plan.json: the plans of all ranks (devices). Raises ArtifactError if the file
    breaks its schema. `check_plans` checks later whether the plans can run."""
    try:
        return PlanFile.model_validate_json(artifact.read_text(PLAN_FILE))
    except ValidationError as error:
        raise malformed(PLAN_FILE, error) from None
