"""Write research/studies.md from the records of the simulations."""

from benchmarks.page import Page, Section, from_records
from benchmarks.support.harness import argument_parser, load_record
from research import bin_ages, bins_live, co_located, smdp_bins

SECTIONS = (
    Section(
        "Maximum ages of each bin",
        "bin_ages",
        "Simulated: sizes uniform from 1 to 20 s, batches of at most 8 that take as long as their largest request, a "
        "device of 1 W while it is busy. 95 per cent within the bound; the share that was measured is in brackets. The "
        "timeout is tuned. Each bin's maximum ages are solved as if it were alone, for a bound that is smaller by a "
        "margin. They save 1 to 2 per cent on the timeout in two bins at loads 0.5 and 0.7 within 60 s, nothing "
        "elsewhere, and cost more in three bins.",
        lambda: bin_ages.table(load_record("bin_ages")),
        "research",
    ),
    Section(
        "Bins decided together",
        "smdp_bins",
        "Simulated: a batch takes as long as its longest request, and the device draws 1 W while it is busy. Sizes are "
        "uniform from 1 to 20 s, or the generated tokens of Azure's trace at 20 ms each; B is the largest batch, and "
        "loads are fractions of what two bins can serve. The cost is the mean response time, s, plus w2 times the mean "
        "power, W. In brackets the difference to the best policy that decides bin by bin (greedy and solved ones, one "
        "to three bins), with its 95 per cent interval.",
        lambda: smdp_bins.table(load_record("smdp_bins")),
        "research",
    ),
    Section(
        "Bins decided together, live",
        "bins_live",
        "A server whose batches take 2 ms for each number of their longest sample, up to 8 samples of 1 to 64 numbers. "
        "Loads are fractions of what two bins can serve.",
        lambda: bins_live.table(load_record("bins_live")),
        "research",
    ),
    Section(
        "Models that share a device",
        "co_located",
        "Simulated: models of equal or unequal load on one Tesla P4; some are slower by the factor 3 or 4. The cost is "
        "the mean response time of all requests, ms, plus w2 times the mean power. `first formed` launches the batch "
        "that was formed first, and the tables of `smdp` are then those of a device of the model's own. `greedy` and "
        "`smdp` are the server's: the largest product of queue, service rate and waiting time is first, and tables are "
        "those of a device that the other models slow down "
        "([several models](../docs/operation.md#several-models-on-a-device)). `valued` launches by the value "
        "functions of such devices, whose arrival rates it is given. Changes have 95 per cent "
        "intervals. No batch becomes overdue, since there is no maximum wait.",
        lambda: co_located.table(load_record("co_located")),
        "research",
    ),
)
PAGE = Page(
    "research/studies.md",
    "Studies of policies",
    from_records("research/studies.md", "research.page", "research/records")
    + " The papers' tables and figures are in [papers.md](papers.md).",
    SECTIONS,
)


def main() -> None:
    """Write the page."""
    argument_parser(__doc__).parse_args()
    PAGE.write()


if __name__ == "__main__":
    main()
