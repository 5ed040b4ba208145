"""Model artifacts: a folder of files with a manifest of their hashes, written atomically and verified before it is read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from streams.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1


class ArtifactError(UserError, ValueError):
    """An artifact that cannot be trusted; the message names the file and what is wrong with it."""


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _version(kind: str, files: dict[str, str]) -> str:
    text = json.dumps([kind, sorted(files.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_artifact(folder: Path, kind: str, meta: dict[str, Any], write: Callable[[Path], None]) -> str:
    """Writes an artifact beside its place and renames it there, so that a reader sees all of it or none.

    Args:
        folder: where it will stand; an artifact already there is replaced.
        kind: what it is, such as "gem"; checked on reading.
        meta: plain values for the manifest.
        write: fills the given folder with files.

    Returns:
        The version: a content hash of 16 hex digits over the files, the same for the same content.
    """
    staging = folder.with_name(folder.name + ".writing")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    write(staging)
    files = {path.name: _digest(path) for path in sorted(staging.iterdir())}
    version = _version(kind, files)
    manifest = {"format": FORMAT, "kind": kind, "version": version, "files": files, "meta": meta}
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(staging, folder)
    shutil.rmtree(old, ignore_errors=True)
    return version


def read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """Verifies an artifact and returns its manifest.

    Raises:
        ArtifactError: the folder or a file is missing, truncated or changed, or it is another kind or format.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise ArtifactError(f"{folder} is no {kind} model: {MANIFEST} is missing") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArtifactError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(manifest, dict) or not _complete(manifest):
        raise ArtifactError(f"{path} lacks one of: format, kind, version, files, meta")
    if manifest["format"] != FORMAT or manifest["kind"] != kind:
        raise ArtifactError(
            f"{path} is a {manifest['kind']!r} artifact of format {manifest['format']}; expected {kind!r} of format {FORMAT}"
        )
    for name, digest in manifest["files"].items():
        file = folder / name
        if not file.exists():
            raise ArtifactError(f"{file} is missing")
        if _digest(file) != digest:
            raise ArtifactError(
                f"{file} is truncated or changed: its SHA-256 differs from the manifest's ({file.stat().st_size} bytes)"
            )
    return manifest


def _complete(manifest: dict[str, Any]) -> bool:
    return set(manifest) >= {"format", "kind", "version", "files", "meta"} and isinstance(manifest["files"], dict)


def version_u64(version: str) -> int:
    """A version as the 64-bit integer that the embedding store keeps in each row."""
    return int(version, 16)


def newest(folders: Iterable[Path]) -> Path | None:
    """The artifact whose manifest was written last, None where there is none."""
    found = [folder for folder in folders if (folder / MANIFEST).exists()]
    return max(found, key=lambda folder: (folder / MANIFEST).stat().st_mtime, default=None)
