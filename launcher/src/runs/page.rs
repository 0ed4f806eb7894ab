//! The page: one file of HTML that needs no other, and is XML as well.

use super::charts::{Chart, PARTS, parts};
use super::read::{Step, Training};
use crate::colours::COLOURS;
use crate::failure::{Failure, Result};
use crate::human;
use crate::layers;
use crate::machine::PROGRAM;
use plotters::prelude::RGBColor;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// More ranks than these are shown as least, mean and most.
const RANKS: usize = 16;

const STYLE: &str = "body{font:15px/1.45 sans-serif;max-width:1280px;margin:24px auto;padding:0 16px;color:#222}\
h1{font-size:24px}h2{font-size:18px;margin-top:32px}table{border-collapse:collapse;margin:8px 0}\
th,td{padding:3px 12px;text-align:right;border-bottom:1px solid #ddd;font-variant-numeric:tabular-nums}\
th{font-weight:600}tr>:first-child{text-align:left}figure{display:inline-block;margin:8px 0;vertical-align:top}\
figcaption{font-weight:600;padding-left:8px}.note{color:#666;font-weight:400}.swatch{display:inline-block;width:12px;height:12px;\
margin-right:6px}div.wide{overflow-x:auto}code{overflow-wrap:anywhere}td.text{text-align:left}";

/// The page of some trainings.
///
/// # Errors
/// A figure that cannot be drawn.
pub fn html(title: &str, trainings: &[Training]) -> Result<String> {
    let title = escaped(title);
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\">\n<!-- generator: {} -->\n<head>\
         <meta charset=\"utf-8\"/>\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/><title>{title}</title>\
         <style>{STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n",
        escaped(PROGRAM)
    );
    page += &legend(trainings);
    page += "<h2>Results</h2>\n";
    page += &table(trainings, &results(trainings));
    page += "<h2>Step by step</h2>\n";
    page += &figures(trainings)?;
    page += "<h2>Where the time of a step went</h2>\n";
    page += &times(trainings)?;
    page += &memory(trainings);
    page += &ranks(trainings);
    page += &settings(trainings);
    page += "</body>\n</html>\n";
    Ok(page)
}

/// Text as it stands in a page, without what XML has not.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe += "&amp;",
            '<' => safe += "&lt;",
            '>' => safe += "&gt;",
            '"' => safe += "&quot;",
            '\n' | '\t' => safe.push(' '),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

fn swatch(colour: RGBColor) -> String {
    let RGBColor(r, g, b) = colour;
    format!("<span class=\"swatch\" style=\"background:rgb({r},{g},{b})\"></span>")
}

fn named(at: usize, training: &Training) -> String {
    format!("{}{}", swatch(COLOURS[at % COLOURS.len()]), escaped(&training.name))
}

/// Which colour is which, how each was called, and what to know of its metrics.
fn legend(trainings: &[Training]) -> String {
    let mut text = String::from("<ul>\n");
    for (at, training) in trainings.iter().enumerate() {
        let mut notes = vec![format!("begun {} UTC", training.setting("start_time"))];
        if training.runs > 1 {
            notes.push(format!("{} runs that went on with each other", training.runs));
        }
        if training.again > 0 {
            notes.push(format!("{} made again", human::several(training.again, "step")));
        }
        if training.summary.is_none() {
            let last = training.steps.last().map_or(0, |step| step.number);
            notes.push(format!("not at its end: step {last} of {}", training.setting("steps")));
        }
        let words = training.about["args"].as_array().map(Vec::as_slice).unwrap_or_default();
        let words: Vec<String> = words.iter().filter_map(Value::as_str).map(human::typed).collect();
        text += &format!(
            "<li>{} <span class=\"note\">{}</span><br/><code>{}</code></li>\n",
            named(at, training),
            escaped(&notes.join("; ")),
            escaped(&words.join(" "))
        );
    }
    text + "</ul>\n"
}

/// A table with a column for each training, of rows that are a name and a cell for each.
fn table(trainings: &[Training], rows: &[(String, Vec<String>)]) -> String {
    let names: String =
        trainings.iter().enumerate().map(|(at, t)| format!("<th>{}</th>", named(at, t))).collect();
    let mut text = format!("<div class=\"wide\"><table>\n<tr><th></th>{names}</tr>\n");
    for (name, cells) in rows {
        let cells: String = cells.iter().map(|cell| format!("<td>{}</td>", escaped(cell))).collect();
        text += &format!("<tr><td>{}</td>{cells}</tr>\n", escaped(name));
    }
    text + "</table></div>\n"
}

/// A number in words, or a dash for none.
fn told(x: f64, words: impl Fn(f64) -> String) -> String {
    if x.is_finite() { words(x) } else { "–".into() }
}

fn results(trainings: &[Training]) -> Vec<(String, Vec<String>)> {
    let mut rows = Vec::new();
    let mut row = |name: &str, cell: &dyn Fn(&Training) -> String| {
        rows.push((name.to_owned(), trainings.iter().map(cell).collect::<Vec<_>>()));
    };
    let rate = |t: &Training| t.median(|step| step.tokens / step.seconds);
    let part = |t: &Training, of: fn(&Step) -> f64| {
        told(100.0 * t.sum(of) / t.sum(|s| s.seconds), |share| format!("{share:.1} %"))
    };
    row("model", &|t| {
        let parameters = t.about["model"]["parameters"].as_f64().unwrap_or(f64::NAN);
        let name = t.about["model"]["name"].as_str().unwrap_or("–");
        format!("{name}, {}", told(parameters, human::count))
    });
    row("type, stage", &|t| format!("{}, {}", t.setting("dtype"), t.setting("stage")));
    row("ranks, transport, device", &|t| {
        format!("{}, {}, {}", t.setting("ranks"), t.setting("transport"), t.setting("device"))
    });
    row("steps", &|t| t.steps.last().map_or(0, |step| step.number).to_string());
    row("tokens", &|t| human::count(t.tokens()));
    row("training loss, last step", &|t| {
        told(t.steps.last().map_or(f64::NAN, |s| s.loss), |x| format!("{x:.4}"))
    });
    row("held-out loss, last", &|t| {
        told(t.evaluations.last().map_or(f64::NAN, |e| e.loss), |x| format!("{x:.4}"))
    });
    row("held-out loss, least of as many tokens as the last", &|t| {
        let last = t.evaluations.last().map(|e| e.tokens);
        let comparable = t.evaluations.iter().filter(|e| Some(e.tokens) == last);
        told(comparable.map(|e| e.loss).fold(f64::NAN, f64::min), |x| format!("{x:.4}"))
    });
    row("held-out losses, and of how many tokens", &|t| {
        let all = t.held_out().into_iter().map(|(tokens, found)| format!("{} of {tokens}", found.len()));
        let all: Vec<_> = all.collect();
        if all.is_empty() { "–".into() } else { all.join(", ") }
    });
    row("tokens/s, median of steps", &|t| told(rate(t), human::rate));
    if trainings.len() > 1 {
        let first = rate(&trainings[0]);
        row("the same, of the first training", &|t| told(rate(t) / first, |x| format!("{x:.2}")));
    }
    row("model FLOP/s, all ranks", &|t| {
        let flops = t.about["flops_per_token"].as_f64().unwrap_or(f64::NAN);
        told(rate(t) * flops, human::rate)
    });
    row("a step, median", &|t| told(t.median(|s| s.seconds), human::seconds));
    row("of it exposed communication", &|t| part(t, |s| s.exposed));
    row("of it forward and backward", &|t| part(t, |s| s.compute));
    row("sent by rank 0 in a step, median", &|t| told(t.median(|s| s.sent), |x| human::bytes(x as u64)));
    if trainings.iter().any(|t| t.steps.iter().any(|s| s.scale.is_some())) {
        row("steps skipped", &|t| t.steps.iter().filter(|s| s.skipped).count().to_string());
    }
    rows
}

fn figures(trainings: &[Training]) -> Result<String> {
    let held_out = |(at, t): (usize, &Training)| t.held_out().into_values().map(move |found| (at, found));
    let marks = trainings.iter().enumerate().flat_map(held_out);
    let of = |title: &str, unit, of: fn(&Step) -> f64| Chart::of(title, unit, trainings, of);
    let charts = [
        of("Loss (points: held out, joined where of as many tokens)", "nats a token", |s| s.loss)
            .map(|c| c.with_marks(marks)),
        of("Speed", "tokens/s", |s| s.tokens / s.seconds).map(Chart::with_zero),
        of("Exposed communication", "% of a step", |s| 100.0 * s.exposed / s.seconds).map(Chart::with_zero),
        of("Norm of the gradient", "", |s| s.grad_norm).map(Chart::with_zero),
        of("Rate of learning", "", |s| s.lr).map(Chart::with_zero),
        of("Scale of the loss (log2)", "", |s| s.scale.map_or(f64::NAN, f64::log2)),
    ];
    let mut text = String::new();
    for chart in charts.into_iter().flatten() {
        let note = match chart.each {
            1 => String::new(),
            each => format!(" <span class=\"note\">means of up to {each} steps</span>"),
        };
        text += &figure(&format!("{}{note}", escaped(&chart.title)), chart.svg())?;
    }
    Ok(text)
}

fn times(trainings: &[Training]) -> Result<String> {
    let names: Vec<String> =
        PARTS.iter().map(|part| format!("{}{}", swatch(part.colour), part.name)).collect();
    let mut text = format!("<p>{}</p>\n", names.join(" \u{2003}"));
    for (at, training) in trainings.iter().enumerate() {
        text += &figure(&named(at, training), parts(training))?;
    }
    Ok(text)
}

/// A figure under its title, which is HTML.
fn figure(title: &str, svg: std::result::Result<String, Box<dyn std::error::Error>>) -> Result<String> {
    let svg = svg.map_err(|e| Failure::run(format!("drawing a figure: {e}")))?;
    Ok(format!("<figure><figcaption>{title}</figcaption>\n{svg}</figure>\n"))
}

fn of_ranks(training: &Training) -> &[Value] {
    training.summary.as_ref().and_then(|s| s["ranks"].as_array()).map(Vec::as_slice).unwrap_or_default()
}

/// What ranks held, beside what was predicted.
fn memory(trainings: &[Training]) -> String {
    let classes: BTreeSet<&String> = trainings
        .iter()
        .flat_map(|t| of_ranks(t).iter().filter_map(|rank| rank["memory"].as_object()).flat_map(|m| m.keys()))
        .filter(|class| *class != "total")
        .collect();
    if classes.is_empty() {
        return String::new();
    }
    let most = |t: &Training, of: &dyn Fn(&Value) -> Option<f64>| {
        let most = of_ranks(t).iter().filter_map(of).fold(f64::NAN, f64::max);
        told(most, |bytes| human::bytes(bytes as u64))
    };
    let mut rows: Vec<(String, Vec<String>)> = Vec::new();
    let mut row = |name: String, of: &dyn Fn(&Value) -> Option<f64>| {
        rows.push((name, trainings.iter().map(|t| most(t, of)).collect()));
    };
    for class in classes {
        row(class.clone(), &|rank| rank["memory"][class].as_f64());
    }
    row("all of these".into(), &|rank| rank["memory"]["total"].as_f64());
    row("predicted".into(), &|rank| rank["predicted_bytes"].as_f64());
    let peak = |t: &Training| {
        let most = most(t, &|rank| rank["peak_rss_bytes"].as_f64());
        // Ranks that are threads have it in one process, whichever of them say so.
        let shared = of_ranks(t).len() > 1 && layers::in_one_process(&t.setting("transport"));
        if shared { format!("{most} (all ranks)") } else { most }
    };
    rows.push(("peak resident".into(), trainings.iter().map(peak).collect()));
    format!("<h2>Memory of the rank with the most of each</h2>\n{}", table(trainings, &rows))
}

/// How ranks differ.
fn ranks(trainings: &[Training]) -> String {
    const COLUMNS: [(&str, &str); 8] = [
        ("forward and backward", "compute_seconds"),
        ("exposed", "exposed_communication_seconds"),
        ("optimizer", "optimizer_seconds"),
        ("batches", "data_seconds"),
        ("evaluation", "evaluation_seconds"),
        ("checkpoints", "checkpoint_seconds"),
        ("all", "seconds"),
        ("sent", "bytes_sent"),
    ];
    let cell = |name: &str, x: f64| match name {
        "bytes_sent" => told(x, |bytes| human::bytes(bytes as u64)),
        _ => told(x, human::seconds),
    };
    let mut rows = String::new();
    for (at, training) in trainings.iter().enumerate() {
        let all = of_ranks(training);
        let column = |name: &str| -> Vec<f64> {
            all.iter().map(|rank| rank[name].as_f64().unwrap_or(f64::NAN)).collect()
        };
        let columns = COLUMNS.map(|(_, name)| (name, column(name)));
        let mut row = |label: String, of: &dyn Fn(&[f64]) -> f64| {
            let cells =
                columns.iter().map(|(name, all)| format!("<td>{}</td>", escaped(&cell(name, of(all)))));
            rows += &format!(
                "<tr><td>{}</td><td>{label}</td>{}</tr>\n",
                named(at, training),
                cells.collect::<String>()
            );
        };
        if all.is_empty() {
            continue;
        }
        if all.len() <= RANKS {
            for (i, rank) in all.iter().enumerate() {
                let number = rank["rank"].as_u64().unwrap_or(i as u64);
                row(number.to_string(), &|all| all[i]);
            }
        } else {
            row("least".into(), &|all| all.iter().copied().fold(f64::NAN, f64::min));
            row("mean".into(), &|all| all.iter().sum::<f64>() / all.len() as f64);
            row("most".into(), &|all| all.iter().copied().fold(f64::NAN, f64::max));
        }
    }
    if rows.is_empty() {
        return String::new();
    }
    let heads: String = COLUMNS.iter().map(|(name, _)| format!("<th>{name}</th>")).collect();
    format!(
        "<h2>Ranks of the last run</h2>\n<div class=\"wide\"><table>\n<tr><th></th><th>rank</th>{heads}</tr>\n{rows}\
         </table></div>\n"
    )
}

/// A setting of settings by one name: `model.hidden`.
fn flat(name: &str, value: &Value, all: &mut BTreeMap<String, String>) {
    match value {
        Value::Object(fields) => {
            for (field, value) in fields {
                let name = if name.is_empty() { field.clone() } else { format!("{name}.{field}") };
                flat(&name, value, all);
            }
        }
        Value::String(text) => drop(all.insert(name.to_owned(), text.clone())),
        other => drop(all.insert(name.to_owned(), other.to_string())),
    }
}

/// The settings, first those in which trainings differ.
fn settings(trainings: &[Training]) -> String {
    /// Different in any two runs.
    const OWN: [&str; 4] = ["args", "start_time", "machine.memory_available_bytes", "machine.shm_free_bytes"];
    let of = |training: &Training| {
        let mut all = BTreeMap::new();
        flat("", &training.about, &mut all);
        all
    };
    let each: Vec<BTreeMap<String, String>> = trainings.iter().map(of).collect();
    let names: BTreeSet<&String> = each.iter().flat_map(BTreeMap::keys).collect();
    let row = |name: &String| {
        let cells = each.iter().map(|all| all.get(name).cloned().unwrap_or_else(|| "–".into()));
        (name.clone(), cells.collect::<Vec<_>>())
    };
    let rows: Vec<_> = names.into_iter().filter(|name| *name != "args").map(row).collect();
    let differs = |(name, cells): &&(String, Vec<String>)| {
        !OWN.contains(&name.as_str()) && cells.iter().any(|cell| *cell != cells[0])
    };
    let different: Vec<_> = rows.iter().filter(differs).cloned().collect();
    let mut text = String::new();
    if !different.is_empty() {
        text += &format!("<h2>Settings that differ</h2>\n{}", table(trainings, &different));
    }
    text + &format!("<details><summary>All settings</summary>\n{}</details>\n", table(trainings, &rows))
}

#[cfg(test)]
mod tests {
    use super::super::read::tests::{read, step};
    use super::*;
    use serde_json::json;

    fn training(name: &str, about: Value, summary: Value) -> Training {
        let lines = [json!({"run": about}), step(1, 5.0), step(2, 4.0), json!({"summary": summary})];
        Training { name: name.into(), ..read(&lines).unwrap() }
    }

    #[test]
    fn settings_that_differ_are_told_from_others() {
        let a = training(
            "a",
            json!({"stage": 1, "model": {"hidden": 8}, "start_time": "x", "args": ["c"]}),
            json!({}),
        );
        let b = training(
            "b",
            json!({"stage": 2, "model": {"hidden": 8}, "start_time": "y", "seed": 3}),
            json!({}),
        );
        let page = settings(&[a, b]);
        let (different, all) = page.split_once("<details>").unwrap();
        assert!(different.contains("<td>stage</td><td>1</td><td>2</td>"), "{different}");
        assert!(different.contains("<td>seed</td><td>–</td><td>3</td>"), "{different}");
        assert!(!different.contains("hidden") && !different.contains("start_time"), "{different}");
        assert!(all.contains("<td>model.hidden</td><td>8</td><td>8</td>"), "{all}");
    }

    #[test]
    fn held_out_losses_of_other_numbers_of_tokens_are_no_series() {
        let evaluation = |step: u64, loss: f64, tokens: u64| {
            let found = json!({"step": step, "loss": loss, "tokens": tokens});
            json!({"evaluation": found})
        };
        let of = |tokens: [u64; 3]| {
            let [a, b, c] = tokens;
            let lines = [
                json!({"run": {}}),
                step(1, 5.0),
                evaluation(1, 0.5, a),
                step(2, 4.0),
                evaluation(2, 0.25, b),
                step(3, 4.0),
                evaluation(3, 15.0, c),
            ];
            html("held out", &[read(&lines).unwrap()]).unwrap()
        };
        // The lines drawn last are the training's, of three steps, and those of what is held out.
        let cases: [(_, _, _, &[usize]); 3] = [
            ([20, 20, 90], "15.0000", "2 of 20, 1 of 90", &[3, 2, 1]),
            ([90, 20, 90], "0.5000", "1 of 20, 2 of 90", &[3, 1, 2]),
            ([90, 90, 90], "0.2500", "3 of 90", &[3, 3]),
        ];
        for (tokens, least, told, drawn) in cases {
            let page = of(tokens);
            assert!(page.contains("<td>held-out loss, last</td><td>15.0000</td>"), "{page}");
            let row = format!("least of as many tokens as the last</td><td>{least}</td>");
            assert!(page.contains(&row) && page.contains(&format!("<td>{told}</td>")), "{page}");
            let figure = page.split("<figure>").find(|figure| figure.contains("points: held out")).unwrap();
            let lines = figure.split("<polyline").skip(1).map(|line| {
                let points = line.split_once(" points=\"").unwrap().1.split('"').next().unwrap();
                points.split_whitespace().count()
            });
            let lengths: Vec<usize> = lines.collect();
            assert!(lengths.ends_with(drawn), "{lengths:?}");
        }
    }

    #[test]
    fn text_of_others_stays_text() {
        let name = "<script>&\"\u{1b}";
        let page =
            html(name, &[training(name, json!({"args": ["caravan", "it's <b>"]}), json!({}))]).unwrap();
        assert!(!page.contains("<script>") && !page.contains("<b>") && !page.contains('\u{1b}'), "{page}");
        assert!(page.contains("<title>&lt;script&gt;&amp;&quot;\u{fffd}</title>"), "{page}");
        assert!(page.contains("caravan 'it'\\''s &lt;b&gt;'"), "{page}");
    }

    #[test]
    fn many_ranks_are_three_rows_and_few_are_their_own() {
        let of = |n: u64| {
            let ranks: Vec<Value> = (0..n)
                .map(|rank| {
                    json!({"rank": rank, "seconds": 1 + rank, "bytes_sent": 1024,
                           "memory": {"optimizer": 2048 * rank, "total": 4096},
                           "predicted_bytes": 4096})
                })
                .collect();
            [training("run", json!({}), json!({"ranks": ranks}))]
        };
        let (few, many) = (ranks(&of(16)), ranks(&of(17)));
        assert_eq!((few.matches("<tr>").count(), many.matches("<tr>").count()), (17, 4));
        assert!(
            many.contains("<td>least</td>")
                && many.contains("<td>9.0 s</td>")
                && many.contains("<td>17.0 s</td>"),
            "{many}"
        );
        let held = memory(&of(3));
        assert!(held.contains("<td>optimizer</td><td>4.00 KiB</td>"), "{held}");
        assert!(held.contains("<td>predicted</td><td>4.00 KiB</td>"), "{held}");
        assert_eq!(ranks(&of(0)) + &memory(&of(0)), "");
    }

    #[test]
    fn the_peak_of_a_process_is_told_from_that_of_a_rank() {
        let of = |transport: &str, peaks: Value| {
            let ranks: Vec<Value> = peaks
                .as_array()
                .unwrap()
                .iter()
                .map(|peak| json!({"memory": {"optimizer": 1, "total": 1}, "peak_rss_bytes": peak}))
                .collect();
            memory(&[training("run", json!({"transport": transport}), json!({"ranks": ranks}))])
        };
        for (transport, peaks, cell) in [
            ("shm", json!([1024, 2048]), "2.00 KiB"),
            ("threads", json!([2048]), "2.00 KiB"),
            ("threads", json!([2048, null]), "2.00 KiB (all ranks)"),
            ("threads+threads", json!([2048, 2048]), "2.00 KiB (all ranks)"),
        ] {
            let page = of(transport, peaks);
            assert!(page.contains(&format!("<td>peak resident</td><td>{cell}</td>")), "{page}");
        }
    }
}
