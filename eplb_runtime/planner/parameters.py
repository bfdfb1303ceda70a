"""The constants of forecast and search in one frozen value. Some are compiled into functions that have @jit.

Each has the measurement that it was kept for: what another value changes, in the imbalance of the windows that come and
in the share of slots that moves (points), on 24 rows of the families of ``tests/benchmarks/planner``, three series
each, of other seeds than its table. Rows that plan anew each window (AR(1), rotating, jumps) stray by 1 % by chance.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchParameters:
    """Forecast, scenarios, starts, descent, choice, certainty: in this order."""

    # Longer histories are merged into at most so many windows. 16: steady EP16 with 32 known +0.4 %, moves +9.
    most_windows: int = 64
    # Fewer windows do not tell a load that moves on from one that is noisy. 8: nothing changes in rows of eight.
    least_windows: int = 5
    # The newest windows on which forecasters are judged. 4: rotating EP8 +1.7 %, AR(1) moves +11.
    judged: int = 8
    # Standard errors by which another forecaster must err less than the mean does, in one layer or in all.
    # 8: shift +3.0 %, rotating EP8 +1.9 %.
    moves_on: float = 4.0
    # By which each layer must where all do. 0.5: nothing changes; 4 (layers alone): AR(1) EP16 +0.6 %.
    moves_on_each: float = 1.0
    # A forecaster whose loss is larger by this share of what the least is above 1 weighs 1 / e.
    # 0.2: rotating EP8, homes alone, +0.9 %.
    sharpness: float = 0.1
    # Weight of the share of tokens foretold for other experts, in the loss.
    # 0: of a steady drift a quarter more is missed.
    between_equals: float = 0.01
    # The newest windows whose deviations the load to come may have. 5: steady EP16 +2.3 %, jitter +1.8 %.
    scenarios: int = 10
    # Further scenarios, to judge by, whose experts deviate each as in a window of its own. 0: rotating +0.6 %.
    mixes: int = 8
    # How much farther than seen scenarios deviate: a plan that fits what was seen meets what was not.
    # 1.0: jitter +0.2 %.
    spread: float = 1.2
    # An expert keeps its home rank while that is heavier than the lightest by no more, of the even load. For homes
    # alone, from few moves to many. (1, 0): hash layers +0.5 %, moves +42; (0.5, 0.12, 0): steady EP16 +2.0 %.
    home_slacks: tuple[float, ...] = (1.0, 0.5, 0.25, 0.12, 0.05, 0.0)
    # The best starts, from which a search descends. 1: hash layers +1.3 %, rotating EP8 +1.0 %; 4: AR(1) EP64 +0.8 %.
    starts: int = 2
    # Passes of water-filling after a step; splits were good before it. 1: one window known +2.4 %, rotating EP8 +0.8 %.
    step_sweeps: int = 3
    # And where a placement is judged. 16: no row is better beyond chance, 32: one window known +3 %.
    sweeps: int = 8
    # Standard errors over the scenarios by which a step must gain. 0: jitter +1.1 %; 2.4: hash layers +4.3 %.
    step_sure: float = 1.2
    # Busiest ranks without a step that helps, after which a descent ends. 3: rotating EP32 +0.8 %; 12: a third slower.
    stuck_ranks: int = 6
    # Imbalance that moving all slots of a layer must be worth on top of its seconds. 0.0025: AR(1) EP64 +0.1 %.
    least_price: float = 0.005
    # The same where windows prove a gain, or homes move alone. 0.025: near uniform and steady move +4.
    price_of_all: float = 0.05
    # Of replicas without proof: `gate="always"`, or layers move on together. 0.4: AR(1) +0.2 %, moves -2.
    price_unproved: float = 0.2
    # Where a layer by itself is sure that it moves on. 0.02: rotating EP8 +0.9 %, moves +24; 0.08: rotating EP8 +0.9 %.
    price_wandering: float = 0.04
    # Of replicas while no slot for them is in use: a first plan lasts.
    # 0.05: rotating EP32 +1.7 %, steady EP64 +0.8 %; 0.01: jitter moves +12.
    first_price: float = 0.02
    # Share of tokens that scenarios send to other experts at which prices hold; less: steadier loads. 0.2: moves +20.
    deviation: float = 0.1
    # Imbalance by which a layer must fall. 0.0025: jitter +0.4 %, moves +4; 0.01: rotating EP8 +0.3 %.
    least_gain: float = 0.005
    # Parts of the windows; a gain is proved on each by a plan for the others. 6: steady EP16 +2.4 %.
    folds: int = 3
    # Errors by which all layers together must gain. 4: steady EP16 +5.8 %.
    sure: float = 2.5
    # And each layer then. 2: nothing, with two layers a row; not measured with more.
    each: float = 1.0


PARAMETERS = SearchParameters()
