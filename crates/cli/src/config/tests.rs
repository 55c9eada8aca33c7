use super::*;

fn sets(sets: &[&str]) -> Result<Sections, ConfigError> {
    let sets = sets.iter().map(|set| (*set).to_owned()).collect();
    load(&ConfigSource { files: vec![], sets })
}

#[test]
fn all_kinds_of_problems_are_reported_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        Utf8PathBuf::from_path_buf(path).unwrap()
    };
    let one = file("one.toml", "[rollout]\ngroup_sise = 4\ngroup_size = 0\n");
    let two = file("two.toml", "[run]\nsteps = \"many\"\neval_samples = 0\n");
    let source = ConfigSource {
        files: vec![one.clone(), two.clone()],
        sets: ["sandbox.memory=4 elephants", "algorithm.gae_lambda=0.9"].map(Into::into).into(),
    };
    let error = load(&source).unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "6 problems in the configuration:\n  \
             {one}:2:1: unknown key rollout.group_sise; did you mean `group_size`?\n  \
             {two}:2:9: run.steps = \"many\": must be a whole number\n  \
             --set sandbox.memory=4 elephants: must be a size like \"4 GiB\", \
             \"512MiB\" or \"4GB\", or a number of bytes\n  \
             {two}:3:1: run.eval_samples = 0: must be at least 1\n  \
             {one}:3:1: rollout.group_size = 0: must be at least 1\n  \
             --set algorithm.gae_lambda=0.9: only applies with policy_loss = \"ppo\"; remove it, or \
             set its default, 1.0"
        )
    );
}

#[test]
fn rules_across_sections_name_where_the_value_was_written() {
    let sections = sets(&["algorithm.routing_replay=predictive", "engine.url=http://a:1"]);
    let text = sections.unwrap().check().unwrap_err().to_string();
    // Although the section has a problem of its own.
    assert!(text.contains("algorithm.mini_steps = 1: must be at least 2"), "{text}");
    assert!(
        text.contains("--set algorithm.routing_replay=predictive: must be \"rollout\""),
        "{text}"
    );
}

/// The keys that are refused because nothing reads them.
fn unread(assignments: &[&str]) -> Vec<String> {
    let Err(ConfigError::Problems(problems)) = sets(assignments).unwrap().check() else {
        return Vec::new();
    };
    let unread = problems.iter().filter(|problem| matches!(problem.found, Found::Unread(_)));
    let texts = unread.map(|problem| (problem.key.clone(), problem.to_string()));
    texts
        .map(|(key, text)| {
            assert!(text.starts_with("--set ") && text.contains("remove it"), "{text}");
            key
        })
        .collect()
}

#[test]
fn agents_need_an_engine_that_samples_from_tokens() {
    let chat = [
        "engine.kind=openai",
        "engine.served_model=m",
        "engine.tokenizer=m",
        "engine.url=http://a:1",
    ];
    for scaffold in ["command", "external"] {
        let scaffold = format!("rollout.scaffold={scaffold}");
        let with = [&chat[..], &[&scaffold]].concat();
        let Err(ConfigError::Problems(problems)) = sets(&with).unwrap().check() else {
            panic!("{scaffold} is accepted")
        };
        assert!(problems.iter().any(|problem| problem.key == "rollout.scaffold"), "{problems:?}");
    }
}

#[test]
fn old_names_are_read_as_the_new_ones() {
    let sections = sets(&["rollout.scaffold=outside", "engine.away_timeout=5m"]).unwrap();
    assert_eq!(sections.origins.renamed().len(), 2);
    let settings = sections.check().unwrap();
    assert_eq!(settings.rollout.scaffold, Scaffold::External);
    assert_eq!(settings.engine.out_of_service_timeout, orchestrate_types::HumanDuration::secs(300));
}

#[test]
fn keys_that_nothing_reads_because_of_another_section_are_refused_by_name() {
    let server = "engine.url=http://a:1";
    let chat = ["engine.kind=openai", "engine.served_model=m", "engine.tokenizer=m", server];
    let agent = ["rollout.scaffold=command", "agent.command=run"];
    let no_rows = ["algorithm.routing_replay=none", "diagnostics.no_replay_every=0"];
    // Each key by itself: what makes it unread, and what makes it read.
    let cases: [(&str, &[&str], &[&str]); 12] = [
        ("agent.port=99", &[], &agent),
        ("gateway.lease=5s", &agent, &["rollout.scaffold=external"]),
        ("embedded.max_running=3", &[server], &[]),
        ("run.keep_checkpoints=9", &["trainer.url=http://a:1"], &[server]),
        ("rollout.thinking=true", &chat, &[server]),
        ("rollout.history=template", &chat, &[server]),
        ("engine.require_routed_experts=false", &[], &[server]),
        ("engine.api_key_env=KEY", &[], &[server]),
        ("engine.tls_ca=ca.pem", &[], &["engine.url=https://a:1"]),
        ("run.eval_held_out_families=3", &["tasks.held_out_file=rows"], &[]),
        ("routing.mixed=drop", &no_rows, &no_rows[..1]),
        ("handoff.share_prefix_rows=true", &no_rows, &no_rows[1..]),
    ];
    assert_eq!(unread(&["engine.request_timeout=5s", server]), ["engine.request_timeout"]);
    for (set, unread_with, read_with) in cases {
        let key = set.split_once('=').unwrap().0;
        assert_eq!(unread(&[unread_with, &[set]].concat()), [key], "{set}");
        assert_eq!(unread(&[read_with, &[set]].concat()), [""; 0], "{set}");
    }
    // A default, as a plan has it written out, is accepted.
    assert_eq!(unread(&["agent.port=4180", "gateway.lease=60s"]), [""; 0]);
}

#[test]
fn what_a_later_layer_leaves_unread_is_left_out_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = Utf8PathBuf::try_from(folder.path().join(name)).unwrap();
        fs_err::write(&path, text).unwrap();
        path
    };
    let base = file("base.toml", "[rollout]\ncommand_timeout = \"10s\"\n");
    let agent = file("agent.toml", "[rollout]\nscaffold = \"command\"\n");
    let late = file("late.toml", "[rollout]\ncommand_timeout = \"20s\"\n");
    let composed = |files: &[&Utf8PathBuf], sets: &[&str]| {
        let files: Vec<Utf8PathBuf> = files.iter().map(|&file| file.clone()).collect();
        let sets: Vec<String> = sets.iter().map(|&set| set.to_owned()).collect();
        let (sections, left_out) = load_layers(&files, &[&sets]).unwrap();
        let left_out: Vec<String> = left_out.iter().map(ToString::to_string).collect();
        (left_out, sections.rollout.command_timeout, sections.unread().len())
    };
    let (left_out, timeout, refused) = composed(&[&base, &agent], &[]);
    assert_eq!((left_out.len(), timeout, refused), (1, None, 0));
    let start = format!("{base}:2:1: rollout.command_timeout = \"10s\": does not apply");
    assert!(left_out[0].starts_with(&start), "{left_out:?}");
    assert_eq!(composed(&[&base], &["rollout.scaffold=external"]).0.len(), 1);
    // With what is before it, each of these is unread where it stands.
    for (files, sets) in [
        (&[&agent, &late][..], &[][..]),
        (&[&base, &agent, &late], &["run.steps=3"]),
        (&[&agent], &["rollout.command_timeout=20s"]),
    ] {
        let (left_out, timeout, refused) = composed(files, sets);
        assert_eq!((left_out.len(), refused), (0, 1), "{files:?}");
        assert!(timeout.is_some());
    }
    // The value in force is the default, which was written nowhere.
    let command = ["agent.command=run".to_owned()];
    let (sections, _) = load_layers(&[base.clone(), agent.clone()], &[&command]).unwrap();
    let shown = sections.with_defaults().unwrap().annotated().unwrap();
    assert!(shown.contains("\ncommand_timeout = \"90s\"\n"), "{shown}");
    // A later layer may make read again what an earlier one left unread.
    let again = composed(&[&base, &agent], &["rollout.scaffold=tools"]);
    assert_eq!((again.0.len(), again.2), (0, 0));
}

#[test]
fn assignments_of_an_earlier_layer_are_left_out_and_those_of_the_same_one_are_refused() {
    let strings = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
    let earlier = strings(&[
        "algorithm.clip_low=0.3",
        "algorithm.dual_clip=4",
        "algorithm.router_shift=before_clip",
        "algorithm.router_shift_floor=0.9",
        "rollout.tool_servers=[{ name = \"docs\", url = \"http://127.0.0.1:1/mcp\" }]",
    ]);
    let later = strings(&["algorithm.policy_loss=sapo", "rollout.scaffold=mini"]);
    let (sections, left_out) = load_layers(&[], &[&earlier, &later]).unwrap();
    let keys: Vec<&str> = left_out.iter().map(|problem| problem.key.as_str()).collect();
    let expected = earlier.iter().map(|set| set.split_once('=').unwrap().0);
    let mut expected: Vec<&str> = expected.collect();
    expected.sort_unstable_by_key(|key| keys.iter().position(|known| known == key));
    assert_eq!(keys, expected);
    let settings = sections.check().unwrap();
    assert_eq!(settings.algorithm.policy_loss().name(), "sapo");
    assert!(settings.rollout.tool_servers.is_empty());
    let together = [earlier.as_slice(), &later].concat();
    let (sections, left_out) = load_layers(&[], &[&together]).unwrap();
    assert_eq!((left_out.len(), sections.unread().len()), (0, earlier.len()));
}

#[test]
fn recorded_changes_are_left_out_where_a_new_one_leaves_them_unread() {
    let changed = |recorded: &str, new: &str| {
        let (recorded, new) = ([recorded.to_owned()], [new.to_owned()]);
        parse_plan("plan.toml", "", &recorded, &new).unwrap().check()
    };
    assert_eq!(
        changed("sandbox.pull_ahead=3", "sandbox.pull=never").unwrap().sandbox.pull_ahead,
        4
    );
    assert!(changed("sandbox.pull=never", "sandbox.pull_ahead=3").is_err());
    changed("engine.request_timeout=5s", "run.steps=3").unwrap();
}

#[test]
fn secrets_of_the_configuration_are_shown_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    let file = Utf8PathBuf::try_from(folder.path().join("a.toml")).unwrap();
    let env = "[\"KEY=canary\", \"canary\"]";
    let server = "[{ name = \"docs\", url = \"http://127.0.0.1:1/mcp?token=canary\" }]";
    fs_err::write(&file, format!("[agent]\nenv = {env}\n[rollout]\ntool_servers = {server}\n"))
        .unwrap();
    let sets = [format!("agent.env={env}"), format!("rollout.tool_servers={server}")];
    for (files, sets) in [(&[file][..], &[][..]), (&[], &sets)] {
        let (sections, _) = load_layers(files, &[sets]).unwrap();
        let shown = sections.annotated().unwrap();
        assert!(shown.contains("KEY=(not shown)") && shown.contains("/mcp?(not shown)"), "{shown}");
        let error = sections.check().unwrap_err().to_string();
        assert!(error.contains("agent.env[1] = \"(not shown)\""), "{error}");
        assert!(!format!("{shown}{error}").contains("canary"), "{shown}{error}");
    }
    // Nor where the value has the wrong type, or is inside of a table.
    for set in ["agent.env=canary", "agent.env=[1, \"canary\"]", "agent={ env = \"canary\" }"] {
        let error = load_layers(&[], &[&[set.to_owned()]]).unwrap_err().to_string();
        assert!(error.contains("agent.env") && !error.contains("canary"), "{error}");
    }
}

#[test]
fn addresses_of_one_layer_do_not_replace_each_other() {
    let sets = ["engine.url=http://a:1", "engine.discover=http://b:1"];
    let source = ConfigSource { files: Vec::new(), sets: sets.map(str::to_owned).to_vec() };
    let error = load(&source).unwrap().check().unwrap_err().to_string();
    assert!(error.contains("must be the only one"), "{error}");
    let root = Utf8PathBuf::try_from(orchestrate_e2e::root()).unwrap();
    let config = root.join("configs/r3-qwen3-30b-a3b-r2e.toml");
    let source = ConfigSource {
        files: vec![config],
        sets: sets[..1].iter().map(|&set| set.to_owned()).collect(),
    };
    assert_eq!(load(&source).unwrap().check().unwrap().engine.discover, None);
}

#[test]
fn an_address_of_a_later_layer_replaces_those_of_earlier_ones() {
    let plan = "[engine]\nurls = [\"http://a:1\", \"http://b:1\"]\n[run]\nsteps = 3\n";
    for (sets, expected) in [
        (&["engine.url=http://c:1", "run.steps=7"][..], [Some("http://c:1"), None]),
        (&["engine.discover=http://d:1"], [None, Some("http://d:1")]),
        (&["engine.url=http://c:1", "engine.discover=http://d:1"], [None, Some("http://d:1")]),
    ] {
        let sets: Vec<String> = sets.iter().map(|&set| set.to_owned()).collect();
        let sections = parse_plan("plan.toml", plan, &[], &sets).unwrap();
        let engine = &sections.engine;
        assert_eq!([engine.url.as_deref(), engine.discover.as_deref()], expected);
        assert_eq!(engine.urls, None);
        assert_eq!(sections.origins.of("engine.urls"), None);
    }
    let both = "[engine]\nurl = \"http://a:1\"\ndiscover = \"http://b:1\"\n";
    let error = parse_layer("plan.toml", both).unwrap().check().unwrap_err().to_string();
    assert!(error.contains("must be the only one"), "{error}");
}

#[test]
fn a_plan_loses_what_an_assignment_leaves_unread_and_an_assignment_does_not() {
    let plan = "[sandbox]\nmirror = \"m.local:5000\"\n[embedded]\nweight_format = \"f32\"\n";
    let resumed = |sets: &[&str]| {
        let sets: Vec<String> = sets.iter().map(|&set| set.to_owned()).collect();
        parse_plan("plan.toml", plan, &[], &sets).unwrap().check()
    };
    assert_eq!(resumed(&[]).unwrap().sandbox.mirror.as_deref(), Some("m.local:5000"));
    let without = resumed(&["sandbox.pull=never", "engine.url=http://a:1"]).unwrap();
    assert_eq!(without.sandbox.mirror, None);
    assert_eq!(without.embedded.weight_format, WeightFormat::default());
    let error = resumed(&["sandbox.pull=never", "sandbox.pull_ahead=3"]).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("--set sandbox.pull_ahead=3: only applies with"), "{text}");
    assert!(!text.contains("mirror"), "{text}");
}

#[test]
fn defaults_written_out_check_to_the_same_settings() {
    let source = [
        "engine.model=\"m\"",
        "routing.cache_bytes=\"0 B\"",
        "algorithm.policy_loss=gspo",
        "tasks.file=\"rows\"",
        "run.eval_every=0",
        "sandbox.hosts=[{ url = \"ssh://a\" }]",
    ];
    let whole = sets(&source).unwrap().with_defaults().unwrap();
    let text = toml::to_string(&whole).unwrap();
    let again = parse_layer("plan.toml", &text).unwrap();
    assert_eq!(again, whole);
    assert_eq!(again.with_defaults().unwrap(), whole);
}

#[test]
fn what_cannot_train_is_refused_for_a_run_alone() {
    for (assignments, key) in [
        (&["rollout.group_size=1"][..], "rollout.group_size"),
        (&["rollout.group_size=1", "algorithm.policy_loss=ppo"], "rollout.group_size"),
        (&["rollout.top_p=0.9"], "rollout.top_p"),
        (&["tasks.held_out_file=rows"], "tasks.file"),
        (&["tasks.held_out_file=rows", "rollout.scaffold=external"], "tasks.file"),
    ] {
        // An evaluation can do with it.
        let settings = sets(assignments).unwrap().check().unwrap();
        let Err(ConfigError::Problems(problems)) = settings.check_training() else {
            panic!("{assignments:?}")
        };
        let keys: Vec<&str> = problems.iter().map(|problem| problem.key.as_str()).collect();
        assert_eq!(keys, [key]);
    }
    for assignments in [&["rollout.group_size=2"][..], &["tasks.held_out_file=r", "tasks.file=r"]] {
        sets(assignments).unwrap().check().unwrap().check_training().unwrap();
    }
}

#[test]
fn shown_values_say_where_they_were_written() {
    let shown = sets(&["run.steps=7"]).unwrap().with_defaults().unwrap().annotated().unwrap();
    assert!(shown.contains("\nsteps = 7  # --set run.steps=7\n"), "{shown}");
    assert!(shown.contains("\ngroup_size = 8\n"), "{shown}");
}

#[test]
fn plans_of_older_versions_are_read() {
    for plan in [
        include_str!("../../tests/plans/default.toml"),
        include_str!("../../tests/plans/options.toml"),
    ] {
        let sections = parse_layer("plan.toml", plan).unwrap();
        let whole = sections.with_defaults().unwrap();
        // Everything that the plan says and something reads is kept.
        let (old, new) = (plan.parse::<toml::Table>(), toml::Table::try_from(&whole));
        let (old, mut new) = (old.unwrap(), new.unwrap());
        new.get_mut("algorithm").unwrap().as_table_mut().unwrap().extend(unused(&old));
        for (name, section) in &old {
            for (key, value) in section.as_table().unwrap() {
                // An older version accepted this key with an inference server.
                let is_read = value.as_str() != Some("q4_0");
                assert_eq!(new[name].get(key) == Some(value), is_read, "{name}.{key}");
            }
        }
    }
}

/// Keys of `[algorithm]` that older versions wrote although they have no effect.
fn unused(plan: &toml::Table) -> toml::Table {
    let keys = ["loss_norm_tokens", "dual_clip", "router_shift", "importance_level"];
    let algorithm = plan["algorithm"].as_table().unwrap();
    let given = keys
        .into_iter()
        .filter_map(|key| algorithm.get(key).map(|value| (key.to_owned(), value.clone())));
    given.collect()
}

#[test]
fn every_path_becomes_absolute_and_nothing_else_changes() {
    let keys = [
        "tasks.file",
        "tasks.held_out_file",
        "agent.folder",
        "gateway.tls_cert",
        "gateway.tls_key",
        "gateway.tls_client_ca",
        "engine.model",
        "engine.tokenizer",
        "engine.tls_ca",
        "engine.tls_cert",
        "engine.tls_key",
        "trainer.tls_ca",
        "trainer.tls_cert",
        "trainer.tls_key",
    ];
    let current = std::env::current_dir().unwrap();
    for key in keys {
        let value = |path: &str| parse_assignment(&format!("{key}={path:?}")).unwrap();
        let absolute = value("x/../y").with_absolute_paths().unwrap();
        assert_eq!(absolute, value(&format!("{}/y", current.display())), "{key}");
    }
    for same in [
        "tasks.file=\"hf://datasets/R2E-Gym/Tiny\"",
        "engine.url=\"http://127.0.0.1:1\"",
        "engine.served_model=\"a/../b\"",
    ] {
        let sections = parse_assignment(same).unwrap();
        assert_eq!(sections.with_absolute_paths().unwrap(), sections, "{same}");
    }
}
