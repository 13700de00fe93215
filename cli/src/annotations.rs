//! What an audit found, as machines of code review show it: commands of a GitHub workflow, and SARIF 2.1.0.

use super::report::Report;
use serde_json::{Value, json};
use sigmascale::serving::{Outcome, ScaleVerdict};
use std::fmt::Write;

/// One thing that is not safe.
struct Problem {
    /// The verdict, or `not-judged`.
    rule: &'static str,
    warning: bool,
    /// Where, as `layer 3, k`; `None` for tensors and files that were not judged.
    place: Option<String>,
    text: String,
}

/// The problems of the audit that was asked for, the worst first.
fn problems(report: &Report) -> Vec<Problem> {
    let audit = &report.audit;
    let mild = audit.outcome == Outcome::NotProven;
    let entries = audit.faults().into_iter().map(|(layer, operand, entry)| Problem {
        rule: entry.verdict.name(),
        warning: mild || entry.verdict == ScaleVerdict::Unknown,
        place: Some(format!("layer {layer}, {operand}")),
        text: entry.why.clone(),
    });
    let unjudged = audit.unjudged.iter().map(|one| Problem {
        rule: "not-judged",
        warning: true,
        place: None,
        text: format!("{}: {}", one.what, one.why),
    });
    entries.chain(unjudged).collect()
}

/// The file that problems are shown at.
fn file(report: &Report) -> String {
    format!("{}/config.json", report.folder.trim_end_matches('/'))
}

/// A line for each problem, which GitHub shows at the file and in the summary of the run.
pub fn github(report: &Report) -> String {
    // https://docs.github.com/actions: values of commands escape these.
    let data = |text: &str| text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A");
    let property = |text: &str| data(text).replace(':', "%3A").replace(',', "%2C");
    let mut out = String::new();
    for problem in problems(report) {
        let command = if problem.warning { "warning" } else { "error" };
        let place = problem.place.map_or_else(|| problem.rule.to_owned(), |place| format!("{place}: {}", problem.rule));
        let title = property(&format!("{}, {place}", report.audit.engine));
        let _ = writeln!(out, "::{command} file={},title={title}::{}", property(&file(report)), data(&problem.text));
    }
    out
}

/// A log of one run.
pub fn sarif(report: &Report) -> Value {
    let problems = problems(report);
    let mut rules: Vec<&str> = problems.iter().map(|problem| problem.rule).collect();
    rules.sort_unstable();
    rules.dedup();
    let result = |problem: &Problem| {
        let mut location = json!({"physicalLocation": {"artifactLocation": {"uri": file(report)}}});
        if let Some(place) = &problem.place {
            location["logicalLocations"] = json!([{"fullyQualifiedName": place}]);
        }
        let place = problem.place.as_ref().map_or_else(String::new, |place| format!("{place}: "));
        json!({
            "ruleId": problem.rule,
            "level": if problem.warning { "warning" } else { "error" },
            "message": {"text": format!("{}: {place}{}", report.audit.engine, problem.text)},
            "locations": [location],
        })
    };
    json!({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{
            "tool": {"driver": {
                "name": "sigmascale verify",
                "version": env!("CARGO_PKG_VERSION"),
                "rules": rules.iter().map(|rule| json!({"id": rule})).collect::<Vec<_>>(),
            }},
            "results": problems.iter().map(result).collect::<Vec<_>>(),
        }],
    })
}
