"""The kernel library: flat operators on packed tokens. Needs torch alone."""

if __name__ == "kernels":
    # Hugging Face publishes a package of this name, and transformers imports it. Python started from the
    # repository's root finds this folder first, so it steps aside for the installed one.
    import importlib.machinery
    import importlib.util
    import os
    import sys

    _root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    _spec = importlib.machinery.PathFinder.find_spec(
        __name__, [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _root]
    )
    if _spec is not None and _spec.loader is not None:
        sys.modules[__name__] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[__name__])
    else:
        globals()["__file__"] = (
            None  # to transformers, a module without a file or a version is a stray folder, not the package
        )
else:
    from .advantages import group_advantages
    from .backend import backend, last_backend
    from .head import linear_logprob
    from .logprob import token_logprob
    from .losses import policy_loss, register_loss
    from .sampling import sample_tokens

    __all__ = [
        "backend",
        "group_advantages",
        "last_backend",
        "linear_logprob",
        "policy_loss",
        "register_loss",
        "sample_tokens",
        "token_logprob",
    ]
