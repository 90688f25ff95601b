from __future__ import annotations

from attnlm.see.curves import verdict

NOTHING = {"bigram_loss": None, "floor": None}


def said(*losses: float, **known: float) -> str:
    records = [{"step": 10 * i, "val_loss": loss} for i, loss in enumerate(losses)]
    return verdict(records, {**NOTHING, **known})


def test_verdicts() -> None:
    assert said(4.0, 3.0).startswith("too few")
    assert said(4.0, 3.0, 2.5, 2.2, 2.1).startswith("loss still falling (0.100")
    assert said(4.0, 2.0, 1.9, 1.899, 1.898, 1.897).startswith("loss levelled off")
    rates = [1.0, 1.0, 0.8, 0.6, 0.4, 0.0]
    losses = [4.0, 2.0, 1.9, 1.899, 1.898, 1.897]
    falling = [{"val_loss": x, "learning_rate": y} for x, y in zip(losses, rates, strict=True)]
    assert verdict(falling, NOTHING).endswith("a longer run may reach a lower one")
    rising = said(4.0, 2.0, 1.5, 1.6, 1.8)
    assert "overfitting" not in rising and "does not fall" in rising
    assert said(4.0, 1.0, 0.52, 0.51, floor=0.49).startswith("within 0.020 of the floor")
    assert said(4.0, 3.0, 2.5, bigram_loss=2.4).endswith("not as good as the counted bigram")
    assert "bigram" not in said(4.0, 3.0, 2.3, bigram_loss=2.4)


def of_tokens(tokens: int, validation: list[float], training: list[float]) -> str:
    pairs = zip(validation, training, strict=True)
    return verdict(
        [
            {"step": i, "val_loss": v, "train_loss": t, "evaluated_tokens": tokens}
            for i, (v, t) in enumerate(pairs)
        ],
        NOTHING,
    )


def test_overfitting_is_a_rise_beyond_noise_while_the_training_loss_falls() -> None:
    falling, level = [3.0, 2.0, 1.5, 1.2, 1.0], [3.0, 2.0, 1.5, 1.6, 1.5]
    rising, noise = [4.0, 2.0, 1.5, 1.6, 1.8], [4.0, 2.0, 1.5, 1.52, 1.54]
    told = of_tokens(100_000, rising, falling)
    assert told.startswith("overfitting since step 2") and "0.300" in told
    assert "does not fall: a lower" in of_tokens(100_000, rising, level)
    assert of_tokens(100_000, noise, falling).startswith("overfitting")
    for few in (1280, 20):
        assert "overfitting" not in of_tokens(few, noise, falling)
    assert "20 validation tokens are too few" in of_tokens(20, noise, falling)
    assert "too few" not in of_tokens(1280, noise, falling)
