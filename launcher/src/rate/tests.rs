//! Rates against their formulas, and against DeepSpeed's own.

use super::*;
use clap::CommandFactory;

fn rate(shape: Shape) -> Rate {
    Rate { peak: 1e-3, floor: 1e-4, start: 0.0, warmup: 100, rise: Rise::Linear, steps: 2000, shape }
}

#[test]
fn warm_up_rises_to_the_peak_and_every_shape_starts_there() {
    for shape in [Shape::Constant, Shape::Linear, Shape::Cosine] {
        let r = rate(shape);
        assert_eq!(r.at(0), 1e-3 * 1.0 / 100.0);
        assert_eq!(r.at(99), 1e-3);
        assert!((r.at(100) - 1e-3).abs() < 1e-18);
        assert!((1..100).all(|s| r.at(s) > r.at(s - 1)));
    }
}

#[test]
fn shapes_come_down_as_the_formulas_say() {
    let by_hand = |s: f64| 1e-4 + 0.5 * (1e-3 - 1e-4) * (1.0 + (PI * (s - 100.0) / 1900.0).cos());
    for s in [100, 500, 1050, 1999] {
        assert!((rate(Shape::Cosine).at(s) - by_hand(s as f64)).abs() < 1e-18, "{s}");
    }
    assert!((rate(Shape::Linear).at(1050) - 5.5e-4).abs() < 1e-15);
    assert_eq!(rate(Shape::Constant).at(1999), 1e-3);
    let (linear, cosine) = (rate(Shape::Linear).at(1999), rate(Shape::Cosine).at(1999));
    assert!(linear > 1e-4 && linear < 1.01e-4 && cosine > 1e-4 && cosine < 1.01e-4);
}

#[test]
fn cosines_are_those_of_the_system() {
    assert_eq!((cos_pi(0.5), cos_pi(0.25)), (0.0, -cos_pi(0.75)));
    for i in 0..=10_000 {
        let turns = f64::from(i) / 10_000.0;
        assert!((cos_pi(turns) - (PI * turns).cos()).abs() < 1e-15, "{turns}");
    }
}

#[test]
fn a_run_that_is_all_warm_up_has_a_rate_for_each_step() {
    let r = Rate { warmup: 5, steps: 5, ..rate(Shape::Cosine) };
    assert!((0..5).all(|s| r.at(s).is_finite()));
    assert_eq!(r.at(4), 1e-3);
}

/// By `launcher/tests/reference/make_schedules.py`.
#[test]
fn deepspeeds_schedules_have_its_rates_at_every_step() {
    #[rustfmt::skip]
    let cases = [
        // Shape and rise, peak, floor and start, steps of the warm-up and of all, and the rates.
        (Shape::WarmupLr, Rise::Linear, [0.01, 0.01, 0.001], [5, 12], [
            0.001, 0.001, 0.0028000000000000004, 0.004600000000000001, 0.0064, 0.008200000000000002,
            0.010000000000000002, 0.010000000000000002, 0.010000000000000002, 0.010000000000000002,
            0.010000000000000002, 0.010000000000000002]),
        (Shape::WarmupLr, Rise::Log, [0.01, 0.01, 0.001], [5, 12], [
            0.001, 0.001, 0.0048760890226605385, 0.007143455750373869, 0.008752178045321076,
            0.010000000000000002, 0.010000000000000002, 0.010000000000000002, 0.010000000000000002,
            0.010000000000000002, 0.010000000000000002, 0.010000000000000002]),
        (Shape::WarmupLr, Rise::Linear, [0.02, 0.02, 0.0], [1, 12], [
            0.0, 0.0, 0.01, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02]),
        (Shape::WarmupLr, Rise::Log, [0.02, 0.02, 0.0], [1, 12], [
            0.0, 0.0, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02]),
        (Shape::WarmupDecayLr, Rise::Linear, [0.01, 0.001, 0.001], [4, 10], [
            0.001, 0.001, 0.0032500000000000003, 0.0055000000000000005, 0.007750000000000001,
            0.010000000000000002, 0.0085, 0.007, 0.0055000000000000005, 0.004, 0.0025, 0.001]),
        (Shape::WarmupDecayLr, Rise::Log, [0.01, 0.001, 0.001], [4, 10], [
            0.001, 0.001, 0.0055000000000000005, 0.008132331253245204, 0.010000000000000002,
            0.010000000000000002, 0.0085, 0.007, 0.0055000000000000005, 0.004, 0.0025, 0.001]),
        (Shape::WarmupDecayLr, Rise::Linear, [0.001, 0.0, 0.0], [6, 3], [
            0.0, 0.0, 0.00016666666666666666, 0.0003333333333333333, 0.0005, 0.0006666666666666666,
            0.0008333333333333334, 0.0, 0.0, 0.0, 0.0, 0.0]),
        (Shape::WarmupDecayLr, Rise::Log, [0.001, 0.0, 0.0], [6, 3], [
            0.0, 0.0, 0.0003868528072345415, 0.0006131471927654584, 0.000773705614469083,
            0.000898244401703927, 0.0009999999999999998, 0.0, 0.0, 0.0, 0.0, 0.0]),
        (Shape::WarmupCosineLr, Rise::Linear, [0.02, 0.001, 0.002], [4, 10], [
            0.0, 0.002, 0.006500000000000001, 0.011000000000000001, 0.015500000000000002, 0.01872724133595217,
            0.01525, 0.0105, 0.005750000000000002, 0.0022727586640478325, 0.001, 0.001]),
        (Shape::WarmupCosineLr, Rise::Log, [0.02, 0.001, 0.002], [4, 10], [
            0.0, 0.002, 0.011000000000000001, 0.016264662506490408, 0.02, 0.01872724133595217, 0.01525,
            0.0105, 0.005750000000000002, 0.0022727586640478325, 0.001, 0.001]),
        (Shape::WarmupCosineLr, Rise::Linear, [0.02, 2.0000000000000003e-06, 0.0], [3, 100], [
            0.0, 0.0, 0.006666666666666666, 0.013333333333333332, 0.019994756214886104, 0.019979030359550877,
            0.019952838928244974, 0.019916209392163025, 0.019869180170630173, 0.019811800590805492,
            0.019744130835944614, 0.0196662418822758]),
        (Shape::WarmupCosineLr, Rise::Log, [0.02, 2.0000000000000003e-06, 0.0], [3, 100], [
            0.0, 0.0, 0.012618595071429147, 0.02, 0.019994756214886104, 0.019979030359550877,
            0.019952838928244974, 0.019916209392163025, 0.019869180170630173, 0.019811800590805492,
            0.019744130835944614, 0.0196662418822758]),
    ];
    for (shape, rise, [peak, floor, start], [warmup, steps], expected) in cases {
        let rate = Rate { peak, floor, start, warmup, rise, steps, shape };
        for (step, expected) in expected.into_iter().enumerate() {
            let (own, bound) = (rate.at(step), 4.0 * f64::EPSILON * rate.peak);
            assert!((own - expected).abs() <= bound, "{rate:?} step {step}: {own} for {expected}");
            assert_eq!(own as f32, expected as f32, "{rate:?} step {step}");
        }
    }
}

#[test]
fn logarithms_are_those_of_the_system() {
    assert_eq!((ln(1.0), ln(2.0)), (0.0, LN_2));
    for i in (1..10_000).chain([1 << 20, 1_000_000_007, usize::MAX >> 11]) {
        let x = i as f64;
        assert!((ln(x) - x.ln()).abs() <= 2.0 * f64::EPSILON * x.ln(), "{x}");
    }
}

#[test]
fn a_warm_up_rises_from_where_it_was_told_to_and_by_logarithms_faster_at_first() {
    let linear = Rate { start: 2e-4, ..rate(Shape::Linear) };
    let log = Rate { rise: Rise::Log, ..linear };
    for warming in [linear, log] {
        assert!(warming.at(0) > 2e-4 && (warming.at(99) - 1e-3).abs() < 1e-18 && warming.at(100) == 1e-3);
        assert!((1..100).all(|s| warming.at(s) > warming.at(s - 1)));
    }
    assert!((0..99).all(|s| log.at(s) > linear.at(s)));
    assert_eq!(Rate { warmup: 1, ..log }.at(0), 1e-3);
}

#[test]
fn a_schedule_may_be_over_before_the_run_is() {
    for shape in [Shape::Linear, Shape::Cosine] {
        let rate = Rate { steps: 200, ..rate(shape) };
        assert!(rate.at(199) > 1e-4 && [200, 201, 5000].iter().all(|&s| (rate.at(s) - 1e-4).abs() < 1e-18));
    }
}

/// As --help says of --schedule-steps.
#[test]
fn each_schedule_has_come_down_at_the_step_that_is_said_of_it() {
    let help =
        crate::args::Cli::command().find_subcommand_mut("train").unwrap().render_long_help().to_string();
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("has come down, or for WarmupDecayLR the one before that"), "{help}");
    for (shape, floor, step) in [
        (Shape::Linear, 1e-4, 2000),
        (Shape::Cosine, 1e-4, 2000),
        (Shape::WarmupCosineLr, 1e-4, 2000),
        (Shape::WarmupDecayLr, 0.0, 2001),
    ] {
        let rate = rate(shape);
        assert!(rate.at(step - 1) > floor + 1e-10, "{shape:?}");
        assert!(
            [step, step + 1, step + 500].iter().all(|&s| (rate.at(s) - floor).abs() < 1e-18),
            "{shape:?}"
        );
    }
}
