"""What a run is asked to do: ``values`` holds the settings, ``sizes`` the models, ``check`` the rules, and
``environment`` reads and writes them as text.

Standard library only, because ``_00_conf.sh`` checks the settings on machines where nothing is installed yet.
"""

from megatron_lm.settings.environment import PREFIX, from_environment
from megatron_lm.settings.sizes import MODELS, Size
from megatron_lm.settings.values import NAMES, Settings

__all__ = ["MODELS", "NAMES", "PREFIX", "Settings", "Size", "from_environment"]
