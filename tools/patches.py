"""`python -m tools.patches [--all] [WORD…]`: break a copy of the source, place by place.

Some test of `make test`, or with --all of `make test-all`, must then fail: the tests of the same
name are tried first, then those of the same room, then the others. Prints a table. Exits with 1 if
no test notices a patch, or if a text to replace no longer occurs once. WORDs choose patches by
their names.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tools.compile_kernels import compile_copy

_ROOT = Path(__file__).parent.parent
_ROOMS = (
    *("model", "generation", "training", "data", "text", "tokens", "runs", "workflows", "config"),
    *("see", "compute", "base", "cli", "project", "test_errors.py"),
)
"""where tests are, in the order in which they are tried"""
_LATER = "not (slow or pages or documents or compilers or variants)"


class Patch(NamedTuple):
    """A change of one file of src/attnlm."""

    name: str
    file: str
    old: str
    new: str


# For each file, what breaks there, and the change: old => new, or a diff where this is longer than
# a line. The file has the old text once, perhaps in a longer line.
_TABLE = r"""
== base/files.py
a replaced file is not flushed
-os.fsync(file.fileno())
-        temporary.replace(path)
+pass
+        temporary.replace(path)
a sealed JSON file's hash is not compared
content.pop("sha256", None) != _json_hash(content) => content.pop("sha256", None) is None
files are written under their final names
temporary = folder / path.name => temporary = path
== base/folders.py
folders only seem to change places
new.rename(target) => pass
locks are ignored
lock.acquire() => pass
== base/own_code.py
code in a run's folder runs unasked
if not _accepted_calls(self.sha256): => if False:
a run calls whatever an accepted file has
if ANY_MODULE in accepted and is_module and => if
a run's file need not be what its hash says
if hashlib.sha256(content).hexdigest() != self.sha256: => if False:
== base/process.py
a second signal waits for whoever is busy
                exit_now(signum) =>                 pass
== cli/exits.py
an interrupted command ends as if it had failed
return 128 + (error.signum => return 1 + (error.signum
== compute/device.py
a device that fails its trial is taken
if problem is None: => if problem != "not there":
== compute/native/attention.c
attention in C sees the next key
-blend(mask_before(c * LANES, s), new_largest, score)
+blend(mask_before(c * LANES, s - 1), new_largest, score)
the gradient of keys in C is wrong by one percent
-unpack_rows(d_keys, row_at(d_k, window, kv_head, 0), d_k->token, length, size, 1);
+unpack_rows(d_keys, row_at(d_k, window, kv_head, 0), d_k->token, length, size, 1.01f);
== compute/native/decoding.c
compiled queries do not see their own token
attend_query(size, position + 1, => attend_query(size, position > 0 ? position : 1,
grouped heads in C read the keys of the first group
norm_rotate(m, packed + m->key_at + k * size, => norm_rotate(m, packed + m->key_at,
threads compute each other's windows
task.first = own.begin; => task.first = 0;
== compute/native/linear.h
a team of threads leaves out the last panel of a product
-outputs = {panels.begin * LINEAR_PANEL, panels.end * LINEAR_PANEL};
+outputs = {panels.begin * LINEAR_PANEL, (panels.end - (self.number > 1)) * LINEAR_PANEL};
== compute/native/pointwise.c
a norm in C forgets a part of its gradient
-- a * coefficient) * inverse
+) * inverse
the gradient of GELU in C is wrong by one percent
-store_partial(x + i, gelu_slope(b, sigma), count - i);
+store_partial(x + i, 1.01f * gelu_slope(b, sigma), count - i);
== compute/threads.py
subnormal numbers are not flushed
torch.set_flush_denormal(True) => pass
== data/batches.py
targets are the inputs
return inputs[rows], targets[rows] => return inputs[rows], inputs[rows]
an epoch's order ignores the seed
key = _random_bits(seed + turn, epoch) => key = _random_bits(turn, epoch)
dropout is not seeded by step
(np.uint64(step) << np.uint64(24)) + windows => windows
the last token of a split is never a target
self._possible = len(tokens) - block_size => self._possible = len(tokens) - block_size - 1
== data/dataset.py
a bin's hash is not compared
if file_hash(path) != meta.files.get(name): => if False:
ids are not compared with the vocabulary
ids_at(ids, slice(None), meta.vocab_size, str(file)) => pass
the largest id of a small vocabulary does not fit
"<u2" if vocab_size <= 2**16 => "<u2" if vocab_size <= 2**16 + 1
== data/examples.py
windows end within an example
counts_WT = places_WT < => counts_WT = places_WT >
== data/spool.py
documents are hashed without their ends
marked if corpus.marks_ends else marked.replace => marked.replace
the split is one character late
_offset(math.floor( => _offset(1 + math.floor(
an example that spans blocks is divided
whole, end, rest = rest.rpartition(END) => whole, end, rest = rest, END, ""
the end of a document at the cut moves to the tail
(signed >= -64) & (signed != -1) => signed >= -64
== generation/next_token.py
the window never moves by half
else max(1, context // 2) => else context
temperature is not applied
logits_BV /= temperature => pass
a token is chosen by logits that are NaN
if not math.isfinite(np.add.reduce(logits_BV, None)): => if False:
top-k keeps one too few
_is_among_largest(logits_BV, least_B1, top_k) => _is_among_largest(logits_BV, least_B1, top_k - 1)
top-p keeps one too few
ordered_BV.cumsum(-1) - ordered_BV < top_p => ordered_BV.cumsum(-1) < top_p
a token without probability is drawn
drawn_B: Ids = (sums_BV > => drawn_B: Ids = (sums_BV >=
== generation/sampling.py
the text goes on to the last stop text
return text[: min(stops)] => return text[: max(stops)]
== model/layers.py
the scale is 1/D
query @ key.mT * query.size(-1) ** -0.5 => query @ key.mT * query.size(-1) ** -1.0
a cache lies one token too early
-stored[..., start : self.length, :] = n
+stored[..., max(0, start - 1) : self.length - (start > 0), :] = n
the mask is shifted by one
tril(total - new) => tril(total - new + 1)
query heads read the keys of other groups
x.repeat_interleave(heads // x.size(-3), dim=-3) => torch.cat([x] * (heads // x.size(-3)), dim=-3)
rotary positions turn the wrong way
torch.cat((-second, first), dim=-1) => torch.cat((second, -first), dim=-1)
== model/language_model.py
positions behind a cache begin at 0
places_T = torch.arange(start, end, device => places_T = torch.arange(0, end - start, device
rotation behind a cache begins at 0
-self.cosines[start:end], self.sines[start:end]
+self.cosines[: end - start], self.sines[: end - start]
== model/loss.py
a loss in pieces keeps the gradient of the last one alone
-d_lm_head_VC += linear(d_logits_mV.T, x_MC[rows].T)[:vocab_size]
+d_lm_head_VC.copy_(linear(d_logits_mV.T, x_MC[rows].T)[:vocab_size])
== model/architecture.py
settings that a rung lacks are ignored
if name not in known: => if False:
== model/recorder.py
the wrong head is silenced
layer, head = silenced[0], silenced[1] - site.first_head => layer, head = silenced[0], 0
== model/textbook.py
the residual stream is left out of the textbook
x_TC = x_TC + mlp_TC if a.residual else mlp_TC => x_TC = mlp_TC
== runs/checkpoint.py
a checkpoint's digest is not compared
facts[_HASH] != _hash(path, str(facts[_HASH])) => facts[_HASH] == ""
a tensor's type is not looked at
form != forms[parameter]: => False:
weights that are NaN are taken
if not all(map(math.isfinite, ends)): => if False:
a checkpoint's facts are left in the order of chance
_HASH: _ZEROS}, sort_keys=True) => _HASH: _ZEROS})
== runs/hub.py
an old transformers is used
[:2])) < _OLDEST: => [:2])) < (0, 0):
tensors of no module are left out
sorted(info["unexpected_keys"]): => ():
an upload is public
private=not public => private=False
== runs/hugging_face.py
only the first differing number is looked for in a text
for window_T in (text_ids, random_ids): => for window_T in (text_ids[:1],):
GPT-2's matrices are not transposed
tensor = tensor.T => tensor = tensor.clone()
a class without a part is taken
if first_difference(ours, model, tokenizer) is not None: => if False:
a model is imported although it computes something else
if token is not None: => if False:
== runs/records.py
the uniform baseline is in bits
"uniform (ln V)": math.log(vocab_size), => "uniform (ln V)": math.log2(vocab_size),
== runs/run.py
what the ticker says of later steps is kept
in self.ticker() if snapshot.step in steps] => in self.ticker()]
== see/comparison.py
groups are ranked while their losses fall
if fall > max(_NOTICEABLE, apart): => if False:
== see/head_scores.py
heads are named without regard to the others
beyond_others = min(MAJORITY, TIMES_OTHERS * others.get(pattern, 0.0)) => beyond_others = 0.0
induction is measured on a text
scores_LHP[..., _INDUCTION] = random_scores_LHP[..., _INDUCTION] => pass
== see/loggers.py
a tool writes through a link
_check_links(event.run.path, name) => pass
== see/page.py
text in pages is not escaped
autoescape=True, => autoescape=False,
== see/pages/arrays.js
a page's temperature is not applied
Math.exp((scores[i] - largest) / temperature) => Math.exp(scores[i] - largest)
== see/pages/batch_model.js
a page trains with the gradient of another sign
gradient[target] -= 1 / M; => gradient[target] += 1 / M;
the gradient of rotary positions in a page turns with them
y.gradient, x.width, -1) => y.gradient, x.width, 1)
== see/pages/chart.js
a script imports a name that no other exports
{element, fractionsAt, withCommas} => {element, fractionsAt, commas}
== see/pages/matmul.js
attention in a page sees the next key
const end = row + t + 1; => const end = row + Math.min(T, t + 2);
== see/pages/optimizer.js
a page's AdamW forgets which step it makes
const correction1 = 1 - beta1 ** (step + 1); => const correction1 = 1 - beta1;
== see/pages/training_pane.js
a loss without heads is compared with that of another step
run.snapshots.find((snapshot) => snapshot.step === step) => this.shown
== see/patch.py
the corrupted activation is put into the corrupted pass
index, clean[index]) => index, corrupted[index])
shares are not relative to the corrupted pass
difference(patched.logits) - d_2[1] => difference(patched.logits)
== see/verdicts.py
many pairs are judged as one
tails = FALSE_CLAIMS / pairs_left => tails = FALSE_CLAIMS
a rung is better where its rival is
rel_tol=_ROUNDING) else b - a => rel_tol=_ROUNDING) else a - b
== text/download.py
a download's hash is not compared
if sha256 not in (None, digest.hexdigest()): => if not digest:
what is in the cache is believed
file_hash(folder / name) == sha256: => (folder / name).is_file():
== text/tasks.py
sums have no carry
str((a + b) % _MODULUS) => str((a + b) % (_MODULUS - 1))
== text/text_files.py
a byte order mark is kept
text.removeprefix("\ufeff") => text
the mark of UTF-16 does not decide
if chunk.startswith(mark) => if False
== tokens/tokenizer.py
text is cut anywhere
place = max(cut.end() if cut else 0, => place = max(0,
a document's own text can end it
for ids in (self.encode_ordinary(text), end) => for ids in (self.encode_piece(text), end)
== tokens/tokenizer_json.py
a tokenizer is exported without being compared
-    check_equal(tokenizer, library)
-    return library
+    return library
== training/loop.py
a signal saves nothing
-            save_state(run, state)
-            replace(run, stopped_after
+            replace(run, stopped_after
== training/memory.py
what can't fit into memory is begun
estimate.model) <= available: => estimate.model):
== training/optimizer.py
AdamW forgets which step it makes
self._count.fill_(made + 1) => self._count.fill_(1)
Muon's momentum is not Nesterov's
direction = gradient_NRC.lerp(mean_NRC, config.beta1) => direction = mean_NRC.clone()
small gradients are scaled up
(self._norm_before_clipping + 1e-6)).clamp(max=1.0)) => (self._norm_before_clipping + 1e-6)))
== training/schedule.py
the first update has the rate 0
return highest * ((made + 1) / (warmup + 1)) => return highest * (made / (warmup + 1))
== training/state.py
the best is the newest
        if improved: =>         if True:
resuming forgets the mean gradient
_copy(means, state.optimizer.state()) => pass
== training/step.py
gradients of threads are added, not averaged
scale = 1 / (gradients * => scale = 1 / (
questions count in the loss of a task
only_answers=training.loss_on == "answers", => only_answers=False,
== training/validation.py
answers behind the first wrong token count
(targets == IGNORED)).all(1) => (targets == IGNORED)).any(1)
each process has its own validation loss
processes.all_reduce(torch.from_numpy(numbers)) => pass
an evaluation goes on after a signal
if stop.has_come: => if False:
evaluation drops the last window
if is_whole and (rest => if False and (rest
bits are nats
loss / math.log(2) / split.bytes_per_token => loss / split.bytes_per_token
== workflows/check_own_code.py
a model that sees later tokens is trained like others
if not force: => if False:
== workflows/train.py
a resumed run starts its budget anew
(1 - state.progress) * training.budget, call.began) => training.budget, call.began)
"""

_CHANGE = re.compile(r"(.*)\n(?:((?!-).*) => (.*)\n|((?:-.*\n)+)((?:\+.*\n)+))")


def _parsed(table: str) -> Iterator[Patch]:
    for section in re.split("^== ", table, flags=re.MULTILINE)[1:]:
        file, changes = section.split("\n", 1)
        for name, old, new, *diff in _CHANGE.findall(changes):
            sides = ("\n".join(line[1:] for line in side.splitlines()) for side in diff)
            yield Patch(name, file, *([old, new] if old else sides))


PATCHES = tuple(_parsed(_TABLE))


def _outcome(patch: Patch, markers: str) -> str:
    """Return where a test fails with this patch, or that none does."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(_ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / "attnlm" / patch.file
        text = path.read_text(encoding="utf-8")
        if text.count(patch.old) != 1:
            return f"OUTDATED: {patch.file} has {text.count(patch.old)} times {patch.old!r}"
        path.write_text(text.replace(patch.old, patch.new), encoding="utf-8")
        if path.suffix in (".c", ".h"):
            compile_copy(source / "attnlm")
        room = _ROOT / "tests" / patch.file.partition("/")[0]
        namesake = sorted(room.glob(f"test_{Path(patch.file).stem}*.py"))
        # C shows in the tests of models and of generation.
        rooms = [] if "native/" in patch.file else [room]
        others = [_ROOT / "tests" / name for name in _ROOMS if _ROOT / "tests" / name not in rooms]
        for place, tests in (("namesake", namesake), ("room", rooms), ("others", others)):
            if not tests:
                continue
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-x", "-m", markers, "-p", "no:cacheprovider"]
                + [str(test) for test in tests],
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
            )
            failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, flags=re.MULTILINE)
            if failed is not None:
                return f"{place}: {failed[1]}"
            if done.returncode in (2, -signal.SIGTERM):  # of a signal that nothing answered
                return f"{place}: the tests were interrupted"
            if done.returncode not in (0, 5):  # 5: all were deselected
                return f"pytest ended with {done.returncode}"
    return "SURVIVED"


def main() -> int:
    """Return 1 unless every patch was noticed."""
    parser = argparse.ArgumentParser(prog="python -m tools.patches")
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--all", action="store_true", help="with the tests of `make test-all`")
    parser.add_argument("--jobs", type=int, default=2, help="patches at once (default: 2)")
    arguments, failed = parser.parse_args(), False
    chosen = [p for p in PATCHES if all(word in p.name for word in arguments.words)]
    markers = "not slow" if arguments.all else _LATER

    def timed(patch: Patch) -> tuple[str, float]:
        began = time.perf_counter()
        return _outcome(patch, markers), time.perf_counter() - began

    print("| broken on purpose | noticed by | seconds |\n| --- | --- | ---: |", flush=True)
    with ThreadPoolExecutor(arguments.jobs) as threads:
        for patch, (outcome, seconds) in zip(chosen, threads.map(timed, chosen), strict=True):
            failed |= outcome.startswith(("SURVIVED", "OUTDATED", "pytest"))
            print(f"| {patch.name} | {outcome} | {seconds:.0f} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
