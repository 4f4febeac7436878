"""Tasks of the reasoning-gym package by name, with their own scorer as the reward."""

from typing import Any

from planner.errors import MissingExtraError, UnknownNameError, UsageError

PREFIX = "reasoning-gym/"


class ReasoningGymTask:
    """A sequence of samples {"prompt", "answer", "entry"} of one procedural task."""

    def __init__(self, name: str, **options: Any) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ModuleNotFoundError:
            raise MissingExtraError(f"the data set {PREFIX}{name}", "gym") from None
        if name not in DATASETS:
            raise UnknownNameError("reasoning-gym task", name, DATASETS)
        try:
            self._dataset = reasoning_gym.create_dataset(
                name, **{"size": 1024, "seed": 0, **options}
            )
        except (TypeError, AssertionError, ValueError) as error:
            raise UsageError(f"train.dataset.options: {error}") from None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        entry = self._dataset[index]
        return {"prompt": entry["question"], "answer": str(entry["answer"]), "entry": entry}

    def score(self, answer: str, entry: dict[str, Any]) -> float:
        """Return the task's own score of `answer`, in [0, 1]."""
        return float(self._dataset.score_answer(answer=answer, entry=entry))
