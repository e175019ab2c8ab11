"""metagrpo: fused kernels and a lean GRPO loop that post-train language models to reason.

``metagrpo.kernels`` needs torch alone; ``metagrpo.trainer`` is the trainer and the command line.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("metagrpo")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"
