"""`python -m tools.mutations [NAME…]`: break a copy of the source on purpose, place by place.

The named tests must then fail. Exits with 1 if they pass on a broken copy, fail without the
mutation, or if the text to replace no longer exists.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.compile_kernels import compile_copy

_TESTS = Path(__file__).parent.parent / "tests"
_SOURCE = _TESTS.parent / "src"


class Mutation(NamedTuple):
    """A change of one file, and the tests that must fail then (file names or node ids)."""

    name: str
    tests: str
    file: str
    old: str
    new: str


# For each file, what breaks there | the tests that must notice, and the change: old => new, or a
# diff where this is longer than a line. The file has the old text once, perhaps in a longer line.
_TABLE = r"""
== base/files.py
a replaced file is not flushed | test_files.py
-os.fsync(file.fileno())
-            temporary.replace(path)
+temporary.replace(path)
a full disk does not say where metrics were appended |
test_training.py::test_a_full_disk_is_reported_with_the_file_and_the_last_step
with naming_path_in_errors(path), path.open("ab") => with path.open("ab")
a sealed JSON file's hash is not compared | test_files.py
content.pop("sha256", None) != _json_hash(content) => content.pop("sha256", None) is None
files are written under their final names | test_files.py
temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp") => temporary = path
a full disk is a fault of our own, as it is prepared |
test_preparation.py::test_a_full_disk_is_one_line_and_the_old_data_stay
-        raise  # the reader of the output has ended
-    except OSError as error:
+        raise  # the reader of the output has ended
+    except BlockingIOError as error:
== base/own_code.py
code in a run's folder runs unasked | test_own_code.py
if self.sha256 not in _CONTENTS and not _is_accepted(self.sha256): => if False:
a run's file need not be what its hash says | test_own_code.py
if hashlib.sha256(content).hexdigest() != self.sha256: => if False:
== base/atomic_folders.py
a folder that can't take its place loses the old one | test_preparation.py
test_trials.py::test_a_short_trial_finds_no_failure[disk]
-        if not os.path.lexists(target):
-            aside.rename(target)
+        pass
a killed exchange is not put back | test_atomic_folders.py
-                aside.rename(target)
-            elif
+                pass
+            elif
folders only seem to change places | test_preparation.py
new.rename(target) => pass
locks are ignored | test_trials.py::test_a_short_trial_finds_no_failure[two]
lock.acquire() => pass
== data/bin_files.py
a document's own text can end it | test_documents.py
if not tokenizer.has_special(piece.text): => if True:
bigrams are smoothed twice | test_preparation.py::test_the_bigram_loss_equals_counted_pairs
smoothed_VV = train_VV + 1 => smoothed_VV = train_VV + 2
== data/splits.py
documents are hashed without their ends | test_documents.py
if not piece.ends or not marks_ends: => if True:
a text that changed is not noticed |
test_preparation.py::test_a_text_that_changes_during_preparation_is_refused
if digest.hexdigest() != self.sha256: => if not digest:
the split is one character late | test_preparation.py::test_the_split_is_exact_to_the_character
-return math.floor(self.text.characters * (1 - self.text.fraction))
+return math.floor(self.text.characters * (1 - self.text.fraction)) + 1
other documents are chosen | test_splits.py
f"1 {row}".encode() => f"{row}".encode()
a document that spans pieces is divided | test_splits.py
if is_chosen and is_complete: => if is_chosen:
== runs/checkpoint.py
a checkpoint's digest is not compared | test_trials.py::test_a_short_trial_finds_no_failure[damage]
metadata["digest"] != _content_digest(metadata["facts"], tensors) => False
a tensor's type is not looked at | test_checkpoint.py
elif tensor.dtype != "F32": => elif False:
weights that are NaN are taken | test_checkpoint.py
check_finite(*(weights[name] for name in parameters)) => pass
== runs/safetensors_file.py
a checkpoint's header is left in the order of chance | test_checkpoint.py
json.dumps(header, sort_keys=True, => json.dumps(header,
== runs/hugging_face/read_model.py
an index of tensors may name any path | test_import.py
if not re.fullmatch(r"[A-Za-z0-9][ => if not re.search(r"[A-Za-z0-9][
every MLP of width 1 is left out | test_import.py::test_only_an_mlp_without_effect_is_dropped
any(weight(name).any() for name in outgoing) => False
== runs/external_formats.py
a model with any tokenizer becomes a Qwen2 model | test_export.py
if stock.tokenizer in (None, tokenizer) => if True
== tokens/tokenizer_json.py
a text added before each text is ignored for characters | test_imported_tokenizers.py
_expect("post_processor", content.get("post_processor"), beginning is None) => pass
a tokenizer is exported without being compared | test_export.py
-    check_equal(tokenizer, library)
-    return library
+    return library
== workflows/export.py
GPT-2's matrices are not transposed | test_export.py
joined.T if mapping.transposed => joined if mapping.transposed
a missing projection is exported as zeros | test_export.py::test_a_stock_class_computes_the_same
torch.eye(a.width) => torch.zeros(a.width, a.width)
== runs/run.py
what the ticker says of later steps is kept | test_ticker.py
self._ticker.records() if line.step in steps] => self._ticker.records()]
== workflows/evaluate.py
an attention that records nothing stops a training | test_ticker.py
-with contextlib.suppress(AttnlmError):
-            maps = recorded
+with contextlib.nullcontext():
+            maps = recorded
== data/dataset.py
a bin's hash is not compared | test_dataset.py
(file_hash if is_whole else sampled_hash)(file) != expected => False
a tokenizer's hash is not compared | test_dataset.py
file_hash(path / "tokenizer.json"), tokenizer.name => meta.tokenizer_sha256, tokenizer.name
ids are not compared with the vocabulary | test_dataset.py
ids_at(ids, slice(None), meta.vocab_size, str(file)) => pass
== see/head_scores.py
heads are named without regard to the others | test_heads.py
beyond_others = min(MAJORITY, TIMES_OTHERS * others.get(pattern, 0.0)) => beyond_others = 0.0
heads are named by a fixed share of the attention | test_heads.py
excess = (score - level) / (1 - level) if level < 1 else 0.0 => excess = score - 0.3
heads are measured on ids that the vocabulary lacks | test_dataset.py
ids_at(tokens, places_NT, vocab_size, origin) => tokens[places_NT]
induction is measured on a text | test_heads.py
scores_LHP[..., _INDUCTION] = random_scores_LHP[..., _INDUCTION] => pass
== see/ladder.py
rungs are ranked while their losses fall | test_ladder.py
if fall > max(NOTICEABLE, abs(gain.nats)): => if False:
== tokens/tokenizer.py
any pattern is taken | test_tokenizer.py::test_a_file_that_makes_no_tokenizer_is_refused
!= pattern_of(stored.name) => == ""
text is cut anywhere | test_tokenizer.py
[cut.end()] if cut else [] => []
== base/folders.py
latest may lead anywhere | test_dataset.py
if latest in names: => if (root / latest).is_dir():
== training/run_writer.py
a full disk is a fault of our own, as it is trained |
test_training.py::test_a_full_disk_is_reported_with_the_file_and_the_last_step
except OSError as error: => except BlockingIOError as error:
a signal saves nothing |
test_training.py::test_stopping_between_evaluations_keeps_the_last_complete_step
save_state(self.run, self._state) => pass
== text/text_files.py
only the start of a file in a folder is decoded | test_corpus.py
is_text = True => return True
a byte order mark is kept | test_corpus.py
text.removeprefix("\ufeff") => text
== text/download.py
a download's hash is not compared | test_download.py::test_a_wrong_hash_is_refused
if sha256 not in (None, digest.hexdigest()): => if not digest:
https may lead to http | test_download.py::test_https_is_verified_and_never_redirected_to_http
if url.lower().startswith("https:") else => if not url else
what is in the cache is believed |
test_download.py::test_damaged_cache_entries_are_downloaded_again
file_hash(folder / file.name) == file.sha256: => (folder / file.name).is_file():
== model/ops/attention.py
the mask is shifted by one | test_attention.py
tril(total - new) => tril(total - new + 1)
== model/attention.py
the scale is 1/D | test_textbook.py
query @ key.mT * query.size(-1) ** -0.5 => query @ key.mT * query.size(-1) ** -1.0
a cache lies one token too early | test_textbook.py
-stored[..., start : self.length, :] = n
+stored[..., max(0, start - 1) : self.length - (start > 0), :] = n
== model/ops/heads.py
rotary positions turn the wrong way | test_ops.py test_textbook.py
torch.cat((-second, first), dim=-1) => torch.cat((second, -first), dim=-1)
== compute/native/pointwise.c
a norm in C forgets a part of its gradient | test_ops.py
-- a * coefficient) * inverse
+) * inverse
the gradient of GELU in C is wrong by one percent |
test_ops.py::test_operations_in_c_of_odd_sizes_equal_pytorch
-store_partial(d_x + i, slope * load_partial(grad + i, count - i), count - i);
+store_partial(d_x + i, 1.01f * slope * load_partial(grad + i, count - i), count - i);
== compute/native/attention.c
attention in C sees the next key | test_ops.py
-blend(mask_before(c * LANES, s), new_largest, score)
+blend(mask_before(c * LANES, s - 1), new_largest, score)
the gradient of keys in C is wrong by one percent | test_ops.py::test_attention_in_c_equals_pytorch
-unpack_rows(d_keys, row_at(d_k, window, kv_head, 0), d_k->token, length, size, 1);
+unpack_rows(d_keys, row_at(d_k, window, kv_head, 0), d_k->token, length, size, 1.01f);
== model/textbook.py
the residual stream is left out of the textbook | test_textbook.py
-y = mlp(a, with_prefix(block, "mlp."), y)
-            x = x + y if a.residual else y
+y = mlp(a, with_prefix(block, "mlp."), y)
+            x = y
== model/inspection.py
a model with changed classes is exported | test_trace.py
if not is_as_built(model): => if False:
a module with another attribute is as it was built | test_inspection.py
return _describe_structure(model) == _intended_structure( => return True or (
a page draws initial weights of another size |
test_train_page.py::test_initial_weights_have_the_distributions_of_pytorch
return "normal", settings["std"] => return "normal", 2 * settings["std"]
== see/pages/chart.js
a script imports a name that no other exports |
test_javascript.py::test_modules_are_valid_and_import_what_others_export
{element, fractionsAt, withCommas} => {element, fractionsAt, commas}
== model/recorder.py
the wrong head is silenced | test_recorder.py
head = self.silenced[1] => head = 0
a product of a softmax is not edited | test_patch.py
return self.edit_activation(place, mixed.reshape(*shape, -1)).view_as(mixed) => return mixed
the embedding is not edited | test_patch.py
after(model.dropout, "stream") => after(None, "stream")
== see/attribution.py
each part is divided by a size of its own | test_attribution.py
(added_NC.sum(0).square().mean() => (added_NC.square().mean(-1, keepdim=True)
== see/patch.py
the corrupted activation is put into the corrupted pass | test_patch.py
index] = clean[pair, index] => index] = corrupted[pair, index]
shares are not relative to the corrupted pass | test_patch.py
d_B - d_N[pair]) => d_B)
later pairs take the place of earlier ones | test_patch.py
sums[site] + recovered_I if number else recovered_I => recovered_I
== compute/native/one_layer.c
compiled gradients of keys come from the queries before them | test_one_layer.py
sum_queries(row, length, d_scores, h->q => sum_keys(row, length, d_scores, h->q
heads of other sizes in C keep what lies behind their rows | test_one_layer.py
to[i] = i < size ? from[i] : 0; => to[i] = from[i];
== compute/native/decoding.c
compiled queries do not see their own token | test_native_decoder.py
attend_query(size, position + 1, => attend_query(size, position > 0 ? position : 1,
grouped heads in C read the keys of the first group | test_native_decoder.py
norm_rotate(m, packed + m->key_at + k * size, => norm_rotate(m, packed + m->key_at,
== compute/native/linear.h
a team of threads leaves out the last panel of a product | test_native_decoder.py
-outputs = {panels.begin * LINEAR_PANEL, panels.end * LINEAR_PANEL};
+outputs = {panels.begin * LINEAR_PANEL, (panels.end - (self.number > 1)) * LINEAR_PANEL};
matrices that become panels are packed from their first rows | test_native_decoder.py
linear->rows + output; => linear->rows;
== compute/native/structs.py
a struct that C lays out in another way is taken | test_native_library.py
if layouts.get(name) != in_c.get(name): => if False:
== see/pages/training_pane.js
a loss without heads is compared with that of another step | test_train_page.py
run.snapshots.find((snapshot) => snapshot.step === step) => this.shown
== training/one_layer.py
a model with changed classes trains without them | test_one_layer.py
or not is_as_built(model) => or not native
gradients of a one-layer rung overwrite those that are there | test_one_layer.py
d["head.weight"].addmm_(d_logits_VM, x_MC) => torch.mm(d_logits_VM, x_MC, out=d["head.weight"])
== compute/device.py
a device that fails its trial is taken | test_device.py
if problem is None: => if problem != "not there":
== data/batches.py
targets are the inputs | test_batches.py
return inputs[rows], targets[rows] => return inputs[rows], inputs[rows]
an epoch's order ignores the seed | test_batches.py
key = _random_bits(seed + turn, epoch) => key = _random_bits(turn, epoch)
an epoch's order is the last one's | test_batches.py
key = _random_bits(seed + turn, epoch) => key = _random_bits(seed + turn, 0 * epoch)
dropout is not seeded by step | test_replicas.py
(np.uint64(step) << np.uint64(24)) + windows => windows
== training/optimizer.py
AdamW forgets which step it makes | test_optimizer.py
self._count.fill_(made + 1) => self._count.fill_(1)
Muon's momentum is not Nesterov's | test_optimizer.py
direction = self._gradient.lerp(self._mean, self._momentum) => direction = self._mean.clone()
norms decay | test_optimizer.py
decays = parameter.ndim > 1 or => decays = parameter.ndim > 0 or
== training/batch_split.py
more windows at once than asked for | test_replicas.py
range(-(-rows // most), rows + 1) => range(max(1, rows // most), rows + 1)
== training/dropout.py
dropout in own code is drawn anew in a resumed run | test_training_own.py
if self._seeds_torch: => if False:
dropout is not seeded | test_replicas.py
generator.manual_seed(seed) => pass
== training/step.py
gradients of threads are added, not averaged | test_replicas.py
scale = 1 / (self._gradient_count * => scale = 1 / (
questions count in the loss of a task | test_answers.py
only_answers=training.loss_on == "answers", => only_answers=False,
all processes drop the same in their windows | test_processes.py
self._first_window + begin) => begin)
a process stops by itself | test_processes.py
self.stop.agree_to_stop() => pass
== training/state.py
the best is the newest | test_training.py
        if improved: =>         if True:
== data/examples.py
windows end within an example | test_examples.py
counts_WT = places_WT < => counts_WT = places_WT >
== training/validation_loss.py
answers behind the first wrong token count | test_answers.py
~is_answer[:, 1:]).all(1) => ~is_answer[:, 1:]).any(1)
== model/layers.py
maps with hooks are not called | test_textbook.py
return type(module) is kind and not module.has_hooks and => return type(module) is kind and
what is computed again drops other numbers | test_training.py
generator.set_state(state) => pass
an evaluation leaves dropout off | test_ticker.py
-model.train(before[0][1])  # own code may do more in `train` than set the mode
-        for module, was_training in before:
-            module.training = was_training
+pass
== training/validation_loss.py
each process has its own validation loss | test_processes.py
processes.all_reduce(numbers) => pass
an evaluation goes on after a signal | test_signals.py
if stop.has_come: => if False:
evaluation drops the last window |
test_training.py::test_evaluation_is_over_the_whole_split_token_by_token
if len(last_window) > 1: => if len(last_window) > model.architecture.block_size:
bits are nats | test_training.py::test_a_run_records_and_reports_its_losses_and_steps
loss / math.log(2) / bytes_per_token => loss / bytes_per_token
== compute/processes.py
all processes say the same error |
test_processes.py::test_an_error_is_raised_first_where_it_should_be_reported
time.sleep(waits * _SECONDS_TO_BE_STOPPED) => pass
the threads that sum gradients of processes do not flush subnormal numbers |
test_processes.py::test_several_processes_compute_the_same_as_one
flush_subnormals()  # the threads => # the threads
== compute/launcher.py
processes import from the current folder |
test_processes.py::test_nothing_in_the_current_folder_is_imported_and_the_error_is_one_line
os.environ["PYTHONSAFEPATH"] = "1" => pass
== model/ops/loss.py
a loss in pieces keeps the gradient of the last one alone | test_ops.py
-d_lm_head_VC += (d_logits_mV.T @ x_MC[rows])[:vocab_size]
+d_lm_head_VC.copy_((d_logits_mV.T @ x_MC[rows])[:vocab_size])
== training/learning_rate.py
a linear schedule is a cosine | test_optimizer.py
is_linear = config.schedule == "linear" => is_linear = config.schedule == ""
== training/budget_clock.py
the clock of a budget leaves no time for the last evaluation |
test_time_budget.py::test_evaluations_that_take_long_are_fewer
left = self.ends - self.closing - now => left = self.ends - now
== workflows/train.py
a model that sees later tokens is trained like others | test_check_own_code.py
if leaks and not force: => if False:
== workflows/ladder.py
a resumed ladder looks for its data where they were | test_ladder.py
if not Path(run.dataset.path).exists(): => if False:
== workflows/tune.py
a resumed tuning forgets how many steps its trials make | test_ladder.py
steps = next(filter(None, made), None) => steps = None
== workflows/job.py
a resumed run starts its budget anew |
test_time_budget.py::test_a_run_that_is_resumed_continues_the_clock
BudgetClock.of((1 - state.progress) * budget, call.began) => BudgetClock.of(budget, call.began)
== training/state.py
what was evaluated is noted too late | test_training.py
self.evaluated_step = self.step => pass
resuming forgets the mean gradient | test_training.py
_copy(means, state.optimizer.state()) => pass
== training/memory.py
what can't fit into memory is begun | test_memory.py
estimate.model) <= available: => estimate.model):
== cli/exits.py
a reader that leaves is an error | test_cli.py::test_a_closed_pipe_is_not_an_error
except BrokenPipeError: => except BlockingIOError:
== cli/help.py
the last value of a repeated option counts |
test_cli.py::test_an_error_names_what_is_wrong_and_a_hint
if count > 1 and => if count > 9 and
== cli/console.py
every word in backticks is printed as an option | test_console.py
_option_of_setting(setting[1]) or setting[0] => flag(setting[1])
== data/prepare.py
options without effect are accepted | test_cli.py::test_an_error_names_what_is_wrong_and_a_hint
request.check_effect(corpus.shown, (*corpus.files, *val_files)) => pass
== generation/batch.py
texts wait for others as long as it takes | test_sampling.py
 or lengths[index] - lengths[group[0]] > tokens: => :
== base/signals.py
a second signal waits for whoever is busy | test_signals.py
-                exit_now(signum)
+                pass
a signal whose exception was kept is forgotten | test_signals.py
timer.start() => pass
a signal that comes as a training ends is forgotten | test_signals.py
if self.signum is not None: => if not self._is_deferred:
== generation/next_token.py
a text that waits for others skips random numbers |
test_sampling.py::test_batched_prompts_equal_single_prompts
self._streams[text].random(most - delay) => self._streams[text].random(most)[delay:]
temperature is not applied | test_sampling.py
logits_BV /= temperature => pass
a token is chosen by logits that are NaN | test_sampling.py
if not math.isfinite(np.add.reduce(logits_BV, None)): => if False:
top-k keeps one too few | test_sampling.py
-np.argpartition(logits_BV, -top_k, axis=-1)[:, :-top_k]
+np.argpartition(logits_BV, 1 - top_k, axis=-1)[:, : 1 - top_k]
top-p keeps one too few | test_sampling.py
ordered_BV.cumsum(-1) - ordered_BV < top_p => ordered_BV.cumsum(-1) < top_p
== generation/native_decoder.py
the window never moves by half | test_sampling.py
else max(1, spec.block_size // 2) => else spec.block_size
== model/architecture.py
a part is in no variant of the tests | test_architecture.py
-    head_bias: bool = _core_part("a bias in the LM head", default=False)
+    head_bias: bool = _core_part("a bias in the LM head", default=False)
+    spare: bool = _core_part("a part of no model", default=False)
== model/presets.py
settings that a rung lacks are ignored | test_settings.py
if name not in preset.settings and not => if False and not
== config/variants.py
the last of two values in a variant counts | test_settings.py
if key in settings: => if False:
== config/recipes.py
a recipe that can't be parsed is our own fault | test_settings.py
except (ValueError, RecursionError) as error: => except RecursionError as error:
== base/folders.py
what lies there and is no run stops the list |
test_manage.py::test_other_files_do_not_stop_a_list
-    except AttnlmError as error:
-        return replace
+    except KeyError as error:
+        return replace
== cli/completion.py
names that a shell takes apart are completed |
test_completion.py::test_words_are_completed_from_options_choices_and_names
- and _PLAIN.fullmatch(word)]
+]
== compute/threads.py
subnormal numbers are not flushed | test_subnormals.py
torch.set_flush_denormal(True) => pass
threads of a pool do not flush subnormal numbers | test_subnormals.py
-        torch.set_num_threads(each)
-        flush_subnormals()
+        torch.set_num_threads(each)
== see/loggers.py
a tool writes through a link |
test_loggers.py::test_a_logger_writes_nothing_through_a_link_out_of_its_folder
_check_links(event.run.path, name) => pass
== generation/decoders.py
what a cache should hold is not looked at | test_sampling.py
any(cache.length != known for cache in caches) => known == 0
a model with changed classes is decoded in C | test_native_decoder.py
and is_as_built(model): => :
sampling does not flush subnormal numbers | test_subnormals.py
-        flush_subnormals()
-        config
+        config
"""


_CHANGE = re.compile(
    r"((?:(?![-+]|.* => ).*\n)+)" + r"(?:(.*) => (.*)\n|((?:-.*\n)+)((?:\+.*\n)+))"
)


def _parsed(table: str) -> Iterator[Mutation]:
    for section in re.split("^== ", table, flags=re.MULTILINE)[1:]:
        file, changes = section.split("\n", 1)
        for about, old, new, *diff in _CHANGE.findall(changes):
            name, tests = " ".join(about.split()).split(" | ")
            sides = ("\n".join(line[1:] for line in side.splitlines()) for side in diff)
            yield Mutation(name, tests, file, *([old, new] if old else sides))


MUTATIONS = tuple(_parsed(_TABLE))


def main() -> int:
    """Returns 1 unless every mutation was caught."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutations")
    names = [mutation.name for mutation in MUTATIONS]
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *names])
    chosen = parser.parse_args().names or names
    mutations = [mutation for mutation in MUTATIONS if mutation.name in chosen]
    if wrong := outdated(mutations):
        print("\n".join(wrong))
        return 1
    if _pytest(sorted({test for mutation in mutations for test in mutation.tests.split()})) != 0:
        print("these tests fail anyway: nothing can be said")
        return 1
    failed = False
    print("| broken on purpose | outcome | seconds |")
    print("| --- | --- | ---: |", flush=True)
    for mutation in mutations:
        began = time.perf_counter()
        code = _pytest(mutation.tests.split(), mutation)
        outcome = {0: "SURVIVED", 1: "caught"}.get(code, f"pytest ended with {code}")
        failed |= outcome != "caught"
        seconds = time.perf_counter() - began
        print(f"| {mutation.name} | {outcome} | {seconds:.0f} |", flush=True)
    return int(failed)


def outdated(mutations: Sequence[Mutation]) -> list[str]:
    """Return mutations that no longer fit: text that does not occur once, or a missing test."""
    wrong = []
    for mutation in mutations:
        path = _SOURCE / "attnlm" / mutation.file
        count = path.read_text(encoding="utf-8").count(mutation.old) if path.is_file() else 0
        if count != 1:
            wrong.append(f"{mutation.name}: {mutation.file} has {count} times {mutation.old!r}")
        for test in mutation.tests.split():
            file, _, function = test.partition("::")
            named = f"def {function.partition('[')[0]}"
            if not any(named in path.read_text(encoding="utf-8") for path in _TESTS.rglob(file)):
                wrong.append(f"{mutation.name}: there is no {test}")
    return wrong


def _place(test: str) -> str:
    """The path of a test file, or of a test in it, from the name of the file."""
    file, colons, function = test.partition("::")
    return f"{next(_TESTS.rglob(file))}{colons}{function}"


def _pytest(tests: list[str], mutation: Mutation | None = None) -> int:
    """Return the exit code of these tests on a copy of the source with this mutation."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(_SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
        if mutation is not None:
            path = source / "attnlm" / mutation.file
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
            if path.suffix in (".c", ".h"):
                compile_copy(source / "attnlm")
        options = ["-x", "-q", "-p", "no:cacheprovider"]
        return subprocess.run(
            [sys.executable, "-m", "pytest", *options, *map(_place, tests)],
            cwd=_SOURCE.parent,
            env={**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
