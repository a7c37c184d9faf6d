"""What a run needs on disk, checked before it is submitted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron_lm import datasets
from megatron_lm.checkpoints import newest
from megatron_lm.errors import SettingsError


def check_files(values: Mapping[str, str]) -> None:
    """Raise ``SettingsError`` if a dataset, checkpoint or container image that the settings name is missing
    or damaged.
    """
    data, load, save = values["DATA_PATH"], values["LOAD"], values["SAVE"]
    if data and (problem := datasets.problem(data)):
        raise SettingsError(f"DATA_PATH={data}: {problem}.")
    if load and newest(Path(load)) is None:
        raise SettingsError(f"LOAD={load}: there is no checkpoint.")
    if save and Path(save).exists() and not Path(save).is_dir():
        raise SettingsError(f"SAVE={save}: is not a folder.")
    if values["SAVE_INTERVAL"] != "0" and not save:
        raise SettingsError(
            f"SAVE_INTERVAL={values['SAVE_INTERVAL']}: set SAVE to a folder for the checkpoints."
        )
    image = values["CONTAINER_IMAGE_PATH"]
    if image and not Path(image).is_file():
        raise SettingsError(f"CONTAINER_IMAGE_PATH={image}: there is no such file; give a .sqsh image.")
    if image and not values["CONTAINER_PATH"]:
        raise SettingsError("CONTAINER_PATH: is empty; set it to the folder that containers are unpacked in.")
