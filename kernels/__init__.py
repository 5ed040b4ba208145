"""Tensor operators of the ranking models: one folder per operator, one public function per need.

Every operator has a `reference` (fp32 maths, the definition), sometimes a faster exact CPU form, and Triton kernels
that are imported only when a CUDA tensor asks for them. Importing this package needs torch alone.

Packed ("jagged") tensors hold the rows of a batch one after another: `x_N...` with int64 `offsets` of shape [B+1],
where row b is `x[offsets[b]:offsets[b+1]]`. Packed entries past `offsets[-1]` are allowed and ignored: outputs and
gradients there are zero.

Shape suffixes: B rows (requests), N packed queries or events, M packed keys, C candidates, H heads, D head width, S
seeds or shared queries, L padded length, K/J input widths, O output width.
"""
