"""A folder of option files as Hydra asks for them."""

from __future__ import annotations

from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigLoadError, ConfigResult
from omegaconf import OmegaConf

from runner.config.compose.files import read_option

__all__ = ["OptionFolder"]


class OptionFolder(FileConfigSource):
    """Reads an option file again only when it has changed, as it is asked for in every request of a process."""

    def load_config(self, config_path: str) -> ConfigResult:
        """The content and the header of an option file.

        Raises:
            ConfigLoadError: it is no mapping of keys that can be read.
        """
        path = Path(self.path) / self._normalize_file_name(config_path)
        try:
            content = read_option(path)
            with path.open(encoding="utf-8") as file:
                header = self._get_header_dict(file.read(512))
        except ValueError as error:
            raise ConfigLoadError(f"{path}: {error}") from error
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(content), header)
