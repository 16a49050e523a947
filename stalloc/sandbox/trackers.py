"""Trackers of experiments, silenced: what a program on the virtual GPU would tell them are zeros.

Contract: programs go on as if their runs were tracked; nothing is sent by the trackers named here, whether or not the
program has set them up itself. Other requests to other machines are real.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from stalloc.imports import after_import

_VARIABLES = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "COMET_OFFLINE": "1",
}
_PUSHES = (
    *("create_commit", "upload_file", "upload_folder", "upload_large_folder"),
    *("delete_file", "delete_files", "delete_folder", "delete_repo", "create_branch", "create_tag", "delete_branch"),
    *("delete_tag", "super_squash_history", "update_repo_settings", "update_repo_visibility", "move_repo"),
)


def silence(folder: Path) -> None:
    """In this process and its children, as far as variables reach them; `folder` takes what is written all the same."""
    os.environ.update(_VARIABLES)
    os.environ["MLFLOW_TRACKING_URI"] = f"file:{folder / 'mlflow'}"
    after_import("mlflow", lambda: _keep_here(sys.modules["mlflow"]))
    after_import("huggingface_hub.hf_api", lambda: _push_nothing(sys.modules["huggingface_hub.hf_api"]))
    after_import("comet_ml", lambda: _comet_offline(sys.modules["comet_ml"]))


def _keep_here(mlflow: Any) -> None:
    for name in ("set_tracking_uri", "set_registry_uri"):
        setattr(mlflow, name, lambda *_, **__: None)


def _comet_offline(comet: Any) -> None:
    offline = getattr(comet, "OfflineExperiment", None)
    if offline is not None:
        comet.Experiment = offline
        started = getattr(comet, "start", None)
        if started is not None:
            comet.start = lambda *words, **named: started(*words, **{**named, "online": False})


def _push_nothing(hub: Any) -> None:
    """Answer as if the hub had taken what is pushed, for callers that look at the answer."""

    def answered(answer: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any, run_as_future: bool = False, **named: Any) -> Any:
            made = answer(*words, **named)
            if not run_as_future:
                return made
            future: Future[Any] = Future()
            future.set_result(made)
            return future

        return call

    def commit(*_: Any, commit_message: str = "", **__: Any) -> Any:
        url = "https://huggingface.co/nobody/nothing/commit/" + 40 * "0"
        return hub.CommitInfo(commit_url=url, commit_message=commit_message, commit_description="", oid=40 * "0")

    def repository(*words: Any, repo_id: str = "", **__: Any) -> Any:
        name = repo_id or next((word for word in words if isinstance(word, str)), "nothing")
        return hub.RepoUrl(f"https://huggingface.co/{name if '/' in name else f'nobody/{name}'}")

    answers = dict.fromkeys(_PUSHES, commit) | {"create_repo": repository}
    for name, answer in answers.items():
        for owner in (hub.HfApi, hub):
            if hasattr(owner, name):
                setattr(owner, name, answered(answer))
