"""What a run is asked to do: ``values`` holds the settings, the models and the rules, and ``conf`` reads and
writes them as text.

Standard library only, because ``_00_conf.sh`` checks the settings on machines where nothing is installed yet.
"""

from megatron_lm.settings.conf import PREFIX, from_environment
from megatron_lm.settings.values import MODELS, NAMES, Settings, Size

__all__ = ["MODELS", "NAMES", "PREFIX", "Settings", "Size", "from_environment"]
