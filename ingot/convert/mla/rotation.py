"""The matrices of a conversion, from the second moments of a layer's keys and values (TransMLA, arXiv 2502.07864).

A rotary embedding turns pairs of elements of a key, and pairs of one frequency by the same angle. So a matrix that
mixes these pairs of all heads commutes with it, if it mixes the first elements as the second ones. The principal
components of such pairs gather the energy of all heads in few pairs (RoRoPE). The other pairs are no longer rotated.
"""

from dataclasses import dataclass

import torch

from ingot.convert.mla.sizes import Sizes


@dataclass(frozen=True)
class Matrices:
    """The matrices of a converted layer, float64. `width` and `keys` are those of Sizes.

    - `rotated`: makes the rotated key of the keys of all heads, [rope_dim, keys]
    - `down`: makes the latent of the keys and then the values of all heads, [rank, 2 * keys]
    - `k_up`: makes keys of the latent, [keys, rank]. They lack what is in the rotated key.
    - `v_up`: makes values of the latent, [keys, rank]
    """

    rotated: torch.Tensor
    down: torch.Tensor
    k_up: torch.Tensor
    v_up: torch.Tensor


def find_matrices(moment: torch.Tensor, sizes: Sizes, *, interleaved: bool) -> Matrices:
    """Return the matrices of a layer from the second moment of its keys and values, [2 * keys, 2 * keys].

    `interleaved` is the order of pairs in the source's keys, as in RotarySpec. The rotated key has pairs of adjacent
    elements, as in DeepSeek.
    """
    keys = sizes.keys
    basis = _basis(moment[:keys, :keys], sizes, interleaved=interleaved)
    rotated, rest = basis[: sizes.rope_dim], basis[sizes.rope_dim :]
    # The parts of keys and values that go into the latent, of the keys and values: an orthonormal set of rows.
    parts = torch.block_diag(rest, torch.eye(keys, dtype=rest.dtype))
    joint = parts @ moment @ parts.T
    ratio = _ratio(joint, len(rest))
    # Keys are often many times larger than values, and the components would then keep keys alone.
    scales = torch.ones(len(joint), dtype=rest.dtype)
    scales[: len(rest)] /= ratio
    components = _components(scales[:, None] * joint * scales)[:, : sizes.rank]
    return Matrices(
        rotated=rotated,
        down=components.T @ (scales[:, None] * parts),
        k_up=ratio * rest.T @ components[: len(rest)],
        v_up=components[len(rest) :],
    )


def _basis(moment: torch.Tensor, sizes: Sizes, *, interleaved: bool) -> torch.Tensor:
    """Return an orthogonal matrix [keys, keys] whose rows make new elements of keys: first those that stay rotated.

    Each group of `freqfold` adjacent frequencies has `freqfold` pairs in each head. Its rows are the principal
    components of these pairs, and the first `kept` of them stay rotated.
    """
    width, fold, half = sizes.width, sizes.freqfold, sizes.width // 2
    kept = sizes.kept
    # Of the component i of a group: the part that it is in, and its place among the part's pairs of this group.
    in_part = fold // sizes.stride
    heads = torch.arange(0, sizes.keys, width)
    basis = torch.zeros(sizes.keys, sizes.keys, dtype=moment.dtype)
    following = sizes.rope_dim
    for group in range(half // fold):
        pairs = torch.arange(group * fold, (group + 1) * fold)
        first = (heads[:, None] + (2 * pairs if interleaved else pairs)).flatten()
        second = first + (1 if interleaved else half)
        both = moment[first][:, first] + moment[second][:, second]
        for index, component in enumerate(_components(both).T):
            if index < kept:
                part, place = divmod(index, in_part)
                row = part * 2 * (half // sizes.stride) + 2 * (group * in_part + place)
            else:
                row, following = following, following + 2
            basis[row, first] = component
            basis[row + 1, second] = component
    return basis


def _ratio(joint: torch.Tensor, keys: int) -> float:
    """Return how many times larger the first `keys` elements are than the others, as means of their magnitudes.

    It is 1 if there are no such elements, or if either magnitude is 0.
    """
    sizes = joint.diagonal().clamp(min=0).sqrt()
    ratio = float(sizes[:keys].mean() / sizes[keys:].mean()) if keys else 1.0
    return ratio if 0 < ratio < float("inf") else 1.0


def _components(moment: torch.Tensor) -> torch.Tensor:
    """Return the principal components of a second moment as columns, largest first."""
    vectors: torch.Tensor = torch.linalg.eigh((moment + moment.T) / 2)[1]
    return vectors.flip(1)
