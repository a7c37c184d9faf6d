"""What a run is asked to do: the settings of ``_00_conf.sh``, as one checked value.

Standard library only, because ``_00_conf.sh`` checks the settings on machines where nothing is installed yet.
"""

from megatron_lm.settings.sizes import MODELS, Size
from megatron_lm.settings.values import Settings

__all__ = ["MODELS", "Settings", "Size"]
