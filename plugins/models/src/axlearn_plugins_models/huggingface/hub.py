"""Locate the directory of a model, or download it from the Hugging Face hub.

This module does not import JAX, and imports `huggingface_hub` only when it downloads a model.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from axlearn_core.errors import RequestError
from axlearn_core.run.notices import log_message
from axlearn_plugins_models.huggingface.members import INDEX, SIDE_FILES, SINGLE, TEMPLATES, read_json

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@([^@\s]+))?")
_WEIGHTS = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.ggml",
    "*.onnx",
    "*.h5",
    "*.msgpack",
    "*.npz",
)
"""Formats of weights that the error for a repository without safetensors lists."""
_OTHER_INDEXES = "*.bin.index.json"


@attrs.frozen
class HubName:
    """A name on the hub, such as `org/name` or `org/name@revision`.

    Attributes:
        repository: Repository, `org/name`.
        revision: Branch, tag or commit, or None for the default branch.
    """

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository


@attrs.frozen
class ModelDirectory:
    """A local directory with a model.

    Attributes:
        path: Path of the directory.
        origin: The path, or for a downloaded model `org/name@commit`.
    """

    path: Path
    origin: str


def parse_name(uri: str | Path) -> HubName | None:
    """Return the name on the hub that a path or URI may be, or None if it can only be a path or a URI.

    A local path always wins. If the folder `runs` exists, `runs/mine` is a path in it, even if it does not exist.
    """
    match = _NAME.fullmatch(str(uri))
    if match is None or Path(uri).exists() or Path(match[1].partition("/")[0]).exists():
        return None
    return HubName(match[1], match[2])


def locate_model(uri: str | Path) -> ModelDirectory:
    """Return the directory of a model. Download it if `uri` is a name on the hub.

    Args:
        uri: Path of a directory, or `org/name` or `org/name@revision`.

    Raises:
        RequestError: If the model cannot be downloaded.
    """
    name = parse_name(uri)
    if name is None:
        return ModelDirectory(Path(uri).expanduser(), str(uri))
    path = download(name)
    return ModelDirectory(path, f"{name.repository}@{path.name}")


def download(name: HubName) -> Path:
    """Download the files of a model that an import needs, and return their directory in the cache of `huggingface_hub`.

    The directory is named after the commit. Files that are already in the cache are not downloaded again. If the hub cannot be
    reached, the newest cached commit of the revision is used. `huggingface_hub` reads its usual environment variables.

    Raises:
        RequestError: If `huggingface_hub` is not installed, if the model cannot be accessed, or if it has no safetensors.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise RequestError(
            f"{name} is not a local directory, and downloading it from the Hugging Face hub requires huggingface_hub, which is "
            "not installed\n    fix: pip install 'axlearn-plugins-models[hub]'"
        ) from error
    try:
        info = HfApi().model_info(name.repository, revision=name.revision)
    except Exception as error:  # the HTTP library, and thus its errors, depend on the version of huggingface_hub
        if (refusal := _refusal(name, error)) is not None:
            raise refusal from error
        return _cached(name, error)
    names = [file.rfilename for file in info.siblings or ()]
    try:
        selection = [*side_files(names), *_weights(name, names, str(info.sha))]
        return _snapshot(name, selection)
    except RequestError:
        raise
    except Exception as error:  # as above
        if (refusal := _refusal(name, error)) is not None:
            raise refusal from error
        raise _failure(name, error) from error


def side_files(names: Iterable[str]) -> list[str]:
    """Return the files among `names` that a model directory keeps besides its weights: configs, tokenizer and templates."""
    return [
        name
        for name in names
        if fnmatch.fnmatchcase(name, f"{TEMPLATES}/*.jinja")
        or ("/" not in name and not fnmatch.fnmatchcase(name, _OTHER_INDEXES) and _matches(name, SIDE_FILES))
    ]


def _weights(name: HubName, names: list[str], commit: str) -> list[str]:
    """Return the safetensors files of a repository, as `files.stored_tensors` finds them in a directory."""
    from huggingface_hub import hf_hub_download

    if INDEX in names:
        index = Path(hf_hub_download(name.repository, INDEX, revision=commit))
        try:
            shards = {str(file) for file in read_json(index.parent, INDEX)["weight_map"].values()}
        except (AttributeError, KeyError, TypeError):
            shards = set[str]()
        return sorted(shards & {*names})  # `files.stored_tensors` reports damaged indexes and missing shards
    tensors = [n for n in names if n.endswith(".safetensors") and "/" not in n]
    if SINGLE in tensors:
        return [SINGLE]
    if len(tensors) == 1:
        return tensors
    formats = Counter(pattern for n in names for pattern in _WEIGHTS if fnmatch.fnmatchcase(n, pattern))
    listing = ", ".join(f"{count} x {pattern}" for pattern, count in sorted(formats.items())) or "no weights"
    raise RequestError(
        f"{name} has neither {SINGLE} nor {INDEX}\n    got: {listing}\n    expected: safetensors\n"
        "    fix: use a repository with safetensors, or, if you trust this one, load it with transformers and save it with "
        "`save_pretrained`"
    )


def _snapshot(name: HubName, selection: list[str]) -> Path:
    """Download files, or find them in the cache."""
    from huggingface_hub import snapshot_download

    patterns = [re.sub(r"([*?[])", r"[\1]", file) for file in selection]
    return Path(snapshot_download(name.repository, revision=name.revision, allow_patterns=patterns))


def _cached(name: HubName, cause: Exception) -> Path:
    """Return the cached directory of a model when the hub cannot be reached. `cause` is the error of the attempt."""
    from huggingface_hub import snapshot_download

    rules: dict[str, Any] = {"allow_patterns": list(SIDE_FILES), "ignore_patterns": ["*/*", "*.index.json"]}
    try:  # this checks that small files are complete; `files.stored_tensors` checks the weights
        path = Path(snapshot_download(name.repository, revision=name.revision, local_files_only=True, **rules))
    except (OSError, ValueError):
        raise _failure(name, cause) from cause
    log_message(f"note: the Hugging Face hub was not asked about {name}; using the cached commit {path.name}")
    return path


def _refusal(name: HubName, error: Exception) -> RequestError | None:
    """Return the error for an answer of the hub that retrying does not change, or None for any other error."""
    from huggingface_hub import constants, errors

    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{name.repository}"
        return RequestError(
            f"{name}: the hub denied access to this repository (HTTP {status})\n"
            f"    fix: request access at {page}, then set HF_TOKEN to a token with access, or run `hf auth login`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return RequestError(
            f"{name}: the repository has no revision {name.revision!r}\n    fix: use a branch, a tag or a commit of it"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return RequestError(
            f"{name} is not a local directory, and there is no such repository at {constants.ENDPOINT}\n"
            "    fix: check the spelling of the path or the name; for a private repository, set HF_TOKEN to a token with access"
        )
    if status in (401, 403):
        return RequestError(
            f"{name}: the hub denied access to this repository (HTTP {status})\n"
            "    fix: set HF_TOKEN to a valid token with access"
        )
    if isinstance(error, errors.HFValidationError):
        return RequestError(f"{name} is neither a local directory nor a valid repository name: {error}")
    return None


def _failure(name: HubName, error: Exception) -> RequestError:
    """Return the error for a model that is not in the cache when the hub cannot be reached."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        reason, fix = "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"
    else:
        text = " ".join(str(error).split()) or type(error).__name__
        reason, fix = f"{constants.ENDPOINT} cannot be reached: {text[:200]}", "check the connection and HF_ENDPOINT"
    return RequestError(
        f"{name} is not a local directory, and not a complete model in the cache of the Hugging Face hub; {reason}\n"
        f"    got: the cache {constants.HF_HUB_CACHE}\n    fix: {fix}, or use the path of a run or a model directory"
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
