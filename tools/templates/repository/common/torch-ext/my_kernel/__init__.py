from .my_op import my_op

__all__ = ["my_op"]
