"""How do actors tell whether weights arrived whole? By ``nereus.transition.checksum``, like the backends below them."""

from nereus.transition.checksum import piece_checksum, piece_view, tensor_view, tensors_checksum

__all__ = ["piece_checksum", "piece_view", "tensor_view", "tensors_checksum"]
