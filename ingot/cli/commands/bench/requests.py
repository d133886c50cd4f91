"""The requests of `ingot bench`: options that several of its commands share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Parameter

from ingot.cli.commands.bench import options
from ingot.ir.errors import OptionError

if TYPE_CHECKING:
    from ingot.bench.workload import Lengths
    from ingot.runtime.loading.artifact import Artifact

Dataset = Literal["random", "sharegpt"]
_SHORTEST = 8  # minimum tokens of a sequence that `sharegpt_lengths` draws


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Requests:
    """The number and the lengths of requests.

    Parameters
    ----------
    dataset
        random: all requests have equal lengths. sharegpt: lengths are drawn as in ShareGPT conversations.
    num_prompts
        Number of requests.
    input_len
        Tokens of each prompt, with --dataset random.
    output_len
        Tokens to generate for each prompt, with --dataset random.
    prefix_len
        Tokens of a prefix that all prompts share. It comes before the tokens of each prompt.
    seed
        Seed of all random values.
    """

    dataset: Dataset = "random"
    num_prompts: int = 1000
    input_len: int = 1024
    output_len: int = 128
    prefix_len: int = 0
    seed: int = 0

    def check(self) -> None:
        """Raise OptionError for values that no artifact can serve, such as prompts without tokens."""
        options.at_least(1, num_prompts=self.num_prompts, input_len=self.input_len, output_len=self.output_len)
        options.at_least(0, prefix_len=self.prefix_len)

    def lengths(self, artifact: "Artifact") -> "list[Lengths]":
        """Return the numbers of prompt tokens and output tokens of each request. The prompt includes the shared prefix.

        Raises OptionError if the artifact's maximum sequence length is too small.
        """
        from ingot.bench.workload import Lengths, equal_lengths, sharegpt_lengths

        longest = options.limit(artifact, "max_seq_len")
        if self.dataset == "random":
            asked = {"input_len": self.input_len, "output_len": self.output_len, "prefix_len": self.prefix_len}
            options.at_most(longest, artifact, "tokens of a sequence", **asked)
            return equal_lengths(self.num_prompts, self.prefix_len + self.input_len, self.output_len)
        if self.prefix_len + _SHORTEST > longest:
            raise OptionError(
                f"--dataset sharegpt with --prefix-len {self.prefix_len}: too much for {artifact.manifest.name}",
                expected=f"{_SHORTEST} tokens more within a sequence of {longest}, for which it was compiled",
            )
        drawn = sharegpt_lengths(self.num_prompts, self.seed, longest - self.prefix_len)
        return [Lengths(self.prefix_len + one.prompt, one.output) for one in drawn]

    def asked(self) -> dict[str, Any]:
        """Return the options that apply to this `dataset`, by name, for the JSON result."""
        equal = {"input_len": self.input_len, "output_len": self.output_len} if self.dataset == "random" else {}
        shared = {name: getattr(self, name) for name in ("dataset", "num_prompts", "prefix_len", "seed")}
        return {**shared, **equal}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SpreadRequests(Requests):
    """The options of `Requests`, with lengths as in ShareGPT conversations by default."""

    dataset: Dataset = "sharegpt"


EQUAL, SPREAD = Requests(), SpreadRequests()
