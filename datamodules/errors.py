"""What can be wrong with the user's media, as one exception that carries the path and the reason."""

from __future__ import annotations


class MediaError(ValueError):
    """An image or video that cannot be used. It is reported with its sample, never replaced by another one.

    Args:
        path: the medium.
        reason: what is wrong with it.
        permanent: False where trying again may help (the file is missing, the network failed).
    """

    def __init__(self, path: object, reason: str, permanent: bool = True) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason
        self.permanent = permanent

    def __reduce__(self) -> tuple[type, tuple[str, str, bool]]:
        return type(self), (self.path, self.reason, self.permanent)
