"""The constants of forecast and search in one frozen value. Some are compiled into functions that have @jit.

They were chosen on tuning seeds of the families in ``tests/benchmarks/planner``, other seeds than its table is made of.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchParameters:
    """Forecast, scenarios, starts, descent, choice, certainty: in this order.

    Args:
        most_windows: longer histories are merged into at most so many windows.
        least_windows: fewer do not tell a load that moves on from one that is noisy.
        judged: the newest windows on which forecasters are judged.
        moves_on: standard errors by which another forecaster must err less than the mean does, in one layer or in all
            layers together; ``moves_on_each``: by which each layer must then.
        sharpness: a forecaster whose loss is larger by this share of what the least one is above 1 weighs 1 / e.
        between_equals: weight of the share of tokens foretold for other experts, in the loss.
        scenarios: the newest windows whose deviations the load to come may have.
        mixes: further scenarios, in which each expert deviates as in a window of its own.
        spread: how much farther than seen scenarios deviate: a plan that fits what was seen meets what was not.
        home_slacks: of the even rank load: an expert keeps its home rank while that is heavier than the lightest by no
            more. From few moves to many; for homes alone. With replicas, homes are either kept or all dealt again.
        starts: the best starts, from which a search descends.
        start_margin: a start that is worse than the best result by more is left out.
        spare_replicas, most_shares: an expert may have as many replicas as its load needs and so many more, or as many
            as keep the shares of all experts over all scenarios below ``most_shares``.
        tried_replicas: steps that give a replica, of which each is tried before one is taken.
        step_sweeps: of water-filling after a step: splits were good before it. Where a placement is judged: at most
            ``sweeps``, until one lowers the busiest rank by a smaller share than ``tolerance``.
        step_sure: standard errors over the scenarios by which a step must gain.
        least_fall: by which the goal must fall in a step.
        loss_weight: a scenario in which a swap loses counts so much: splits of replicas make up for most of it.
        spread_weight: of the variance of rank loads in the goal. It leads over plateaus, where several ranks are the
            busiest and one step cannot lower the maximum.
        stuck_ranks: busiest ranks without a step that helps, after which a descent ends.
        enough: imbalance at which a descent ends.
        least_price: imbalance that moving all slots of a layer must be worth on top of its seconds: of ways that are as
            good, the shorter. ``price_of_all``: the same where windows prove a gain, or homes move alone;
            ``price_unproved``: of replicas where ``gate="always"`` asks for no proof; ``price_moving_on``: of replicas
            where layers together say that the load moves on, ``price_wandering``: where the layer itself does;
            ``first_price``: while no replica slot is in use: a first plan lasts.
        deviation: the share of tokens that scenarios send to other experts at which prices hold; less: steadier loads.
        least_gain: imbalance by which a layer must fall; ``nearly``: share of it that a shorter way may be worse.
        busiest_link: moves over the busiest link, in units of the mean link.
        folds: parts of the windows; a gain is proved on each by a plan for the others.
        sure, each: errors by which all layers together must gain, and each layer then.
    """

    most_windows: int = 64
    least_windows: int = 5
    judged: int = 8
    moves_on: float = 4.0
    moves_on_each: float = 1.0
    sharpness: float = 0.1
    between_equals: float = 0.01
    scenarios: int = 10
    mixes: int = 8
    spread: float = 1.2
    home_slacks: tuple[float, ...] = (1.0, 0.5, 0.25, 0.12, 0.05, 0.0)
    starts: int = 2
    start_margin: float = 0.05
    spare_replicas: int = 4
    most_shares: int = 2**18
    tried_replicas: int = 3
    step_sweeps: int = 3
    sweeps: int = 16
    tolerance: float = 1e-4
    step_sure: float = 1.2
    least_fall: float = 1e-6
    loss_weight: float = 0.25
    spread_weight: float = 0.1
    stuck_ranks: int = 6
    enough: float = 1.001
    least_price: float = 0.005
    price_of_all: float = 0.05
    price_unproved: float = 0.2
    price_moving_on: float = 0.4
    price_wandering: float = 0.04
    first_price: float = 0.02
    deviation: float = 0.1
    least_gain: float = 0.005
    nearly: float = 0.1
    busiest_link: float = 1.5
    folds: int = 3
    sure: float = 2.5
    each: float = 1.0


PARAMETERS = SearchParameters()
