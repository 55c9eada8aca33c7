use super::*;
use orchestrate_sandbox::ChangedFile;

const SITE: &str = "/env/lib/python3.9/site-packages";
const FINDER: &str =
    "import sys\nMAPPING: dict[str, str] = {'calc': '/testbed/calc'}\nclass F: pass\n";

fn installed(files: &[(&str, &str)]) -> Installed {
    let place = |path: &str| {
        if path.starts_with('/') { path.to_owned() } else { format!("{SITE}/{path}") }
    };
    Installed {
        sites: vec![SITE.to_owned()],
        scripts: "/env/bin".to_owned(),
        files: files.iter().map(|(path, text)| (place(path), Some((*text).to_owned()))).collect(),
    }
}

fn image() -> Installed {
    installed(&[
        ("easy-install.pth", "/testbed\n"),
        ("calc.egg-link", "/testbed\n."),
        ("adder_lib-1.0.dist-info/direct_url.json", "{\"url\": \"file:///testbed\"}"),
        ("adder_lib-1.0.dist-info/top_level.txt", "adder\n"),
        ("__editable___calc_1_0_finder.py", FINDER),
        ("cov-1.0.dist-info/entry_points.txt", "[pytest11]\ncov = cov.plugin\n"),
        ("cov-1.0.dist-info/direct_url.json", "{\"url\": \"file:///testbed2\"}"),
        ("hook.pth", "import hook\n"),
    ])
}

fn file(path: &str, mode: u32, is_new: bool) -> ChangedFile {
    let path = path.trim_start_matches('/').to_owned();
    ChangedFile { path, mode, size: 1, is_new, is_binary: false }
}

const EDITABLE: &str = "python -m pip install -e .";

#[test]
fn an_installation_of_the_project_is_accepted_and_nothing_else() {
    let image = image();
    let existed = |path: &str| path == "calc.py";
    let rules = InstallationRules::new("/testbed", "owner/Calc-Tools", EDITABLE, &image, &existed);
    for path in [
        "/testbed/calc.egg-info/PKG-INFO",
        "/testbed/calc.egg-info/entry_points.txt",
        "/testbed/_version.py",
        "/testbed/calc/_fast.cpython-39-x86_64-linux-gnu.so",
        "/testbed/calc/tests/data.so",
        "/testbed/build/lib/conftest.py",
        "/testbed/.git/index",
        "/env/lib/python3.9/site-packages/easy-install.pth",
        "/env/lib/python3.9/site-packages/calc_tools.egg-link",
        "/env/lib/python3.9/site-packages/calc-nspkg.pth",
        "/env/lib/python3.9/site-packages/calc_tools-2.0.dist-info/RECORD",
        "/env/lib/python3.9/site-packages/adder_lib-1.1.dist-info/METADATA",
        "/env/lib/python3.9/site-packages/__editable__.calc-1.0.pth",
        "/env/bin/calc",
        "/env/share/man/man1/calc.1",
    ] {
        for is_new in [true, false] {
            let written = vec![file(path, 0o10_0644, is_new)];
            let changes = TreeChanges { written, removed: Vec::new() };
            assert_eq!(rules.judge(&changes).refused, None, "{path}");
        }
    }
    for path in [
        "/env/bin/python3.9",
        "/env/bin/git",
        "/usr/bin/git",
        "/etc/ld.so.preload",
        "/lib/x86_64-linux-gnu/libc.so.6",
        "/root/.gitconfig",
        "/root/.local/lib/python3.9/site-packages/usercustomize.py",
        "/env/lib/python3.9/os.py",
        "/env/lib/python3.9/site-packages/pytest/__init__.py",
        "/env/lib/python3.9/site-packages/evil.pth",
        "/env/lib/python3.9/site-packages/sitecustomize.py",
        "/env/lib/python3.9/site-packages/adder/__init__.py",
        "/env/lib/python3.9/site-packages/cov-1.0.dist-info/entry_points.txt",
        "/env/lib/python3.9/site-packages/x.pyc",
        "/testbed/.git/config",
        "/testbed/.git/hooks/post-checkout",
        "/testbed/.gitattributes",
        "/testbed/.grading/reporter.py",
        "/testbed/conftest.py",
        "/testbed/pytest.ini",
        "/testbed/sitecustomize.so",
        "/testbed/random.py",
        "/testbed/pluggy.cpython-39-x86_64-linux-gnu.so",
        "/testbed/tests/test_calc.py",
        "/testbed2/x",
        "/name that is not UTF-8",
    ] {
        let written = vec![file(path, 0o10_0644, true)];
        let changes = TreeChanges { written, removed: Vec::new() };
        assert_eq!(rules.judge(&changes).refused.as_deref(), Some(path));
        let removed = vec![path.trim_start_matches('/').to_owned()];
        let changes = TreeChanges { written: Vec::new(), removed };
        assert_eq!(rules.judge(&changes).refused.as_deref(), Some(path));
    }
    // A link in place of a file that may be written.
    let written = vec![file("/env/bin/calc", 0o12_0777, true)];
    let changes = TreeChanges { written, removed: Vec::new() };
    assert_eq!(rules.judge(&changes).refused.as_deref(), Some("/env/bin/calc"));
}

#[test]
fn compiled_modules_are_removed_wherever_they_are() {
    let image = image();
    let rules = InstallationRules::new("/testbed", "o/calc", EDITABLE, &image, &|_| false);
    let paths = [
        "/env/lib/python3.9/__pycache__/os.cpython-39.pyc",
        "/testbed/tests/__pycache__/helper.cpython-39.pyc",
        "/testbed/conftest.pyc",
    ];
    let written = paths.iter().map(|path| file(path, 0o10_0644, true)).collect();
    let judged = rules.judge(&TreeChanges { written, removed: Vec::new() });
    assert_eq!(judged.refused, None);
    assert_eq!(judged.compiled, paths);
    let written = vec![file(paths[0], 0o12_0777, true)];
    assert!(rules.judge(&TreeChanges { written, removed: Vec::new() }).refused.is_some());
}

#[test]
fn copies_of_the_project_belong_to_installations_that_are_not_editable() {
    let image = image();
    let path = "/env/lib/python3.9/site-packages/adder/__init__.py";
    let written = vec![file(path, 0o10_0644, false)];
    let changes = TreeChanges { written, removed: Vec::new() };
    for (install, expected) in [("pip install .", None), (EDITABLE, Some(path))] {
        let rules = InstallationRules::new("/testbed", "o/calc", install, &image, &|_| false);
        assert_eq!(rules.judge(&changes).refused.as_deref(), expected);
    }
}

#[test]
fn files_that_load_code_are_compared_line_by_line() {
    let before = image();
    let rules = InstallationRules::new("/testbed", "o/calc", EDITABLE, &before, &|_| false);
    assert_eq!(rules.new_hook(&before), None);
    let import = "import __editable___calc_1_1_finder; __editable___calc_1_1_finder.install()";
    let finder = FINDER.replace("/testbed/calc", "/testbed/src/calc");
    for (path, text) in [
        ("easy-install.pth", "/testbed\n/testbed/src\n"),
        ("__editable__.calc-1.1.pth", import),
        ("__editable___calc_1_1_finder.py", &finder),
        ("calc.dist-info/entry_points.txt", "[console_scripts]\ncalc = calc:main\n"),
        ("/testbed/calc.egg-info/entry_points.txt", "[pytest11]\ncov = cov.plugin\n"),
    ] {
        assert_eq!(rules.new_hook(&installed(&[(path, text)])), None, "{path}: {text}");
    }
    for (path, text) in [
        ("easy-install.pth", "/testbed\n/tmp\n"),
        ("easy-install.pth", "/testbed/x.egg\n"),
        ("easy-install.pth", "/testbed/../tmp\n"),
        ("easy-install.pth", "import os\r/testbed\n"),
        ("easy-install.pth", "import sys; sys.path.insert(0, '/testbed')\n"),
        ("__editable__.calc-1.1.pth", "import __editable___x; __editable___x.install(); import y"),
        ("__editable___calc_1_1_finder.py", "import os\n"),
        ("__editable___calc_1_1_finder.py", &FINDER.replace("class F: pass", "class F: x = 1")),
        ("__editable___calc_1_1_finder.py", &FINDER.replace("/testbed/calc", "/tmp/calc")),
        ("__editable___calc_1_1_finder.py", &FINDER.replace("'/testbed/calc'", "exec('x')")),
        ("calc.dist-info/entry_points.txt", "[pytest11]\ncalc = calc\n"),
        ("calc.dist-info/entry_points.txt", "[console_scripts]\n[[pytest11]]\ncalc = calc\n"),
        ("/testbed/calc.egg-info/entry_points.txt", "[hypothesis]\ncalc = calc\n"),
    ] {
        assert!(rules.new_hook(&installed(&[(path, text)])).is_some(), "{path}: {text}");
    }
    let mut unreadable = before.clone();
    unreadable.files.insert(format!("{SITE}/easy-install.pth"), None);
    assert!(rules.new_hook(&unreadable).is_some());
}

#[test]
fn a_file_whose_name_is_not_utf_8_is_named_and_does_not_hide_the_others() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    let folder = tempfile::tempdir().unwrap();
    let tree = folder.path().to_str().unwrap();
    for name in [&b"a\xff-info"[..], b"a\\udcff-info", "\u{e9}-info".as_bytes()] {
        let package = folder.path().join(OsStr::from_bytes(name));
        fs_err::create_dir(&package).unwrap();
        fs_err::write(package.join("entry_points.txt"), "[pytest11]\nhook = hook\n").unwrap();
    }
    let arguments = ["-I", "-S", "-B", "-X", "utf8", "-c", include_str!("../installed.py"), tree];
    let Ok(output) = std::process::Command::new("python3").args(arguments).output() else {
        orchestrate_e2e::skip::skip("python", "no python3");
        return;
    };
    let mut found: Installed = serde_json::from_slice(&output.stdout).unwrap();
    found.files.retain(|path, _| path.starts_with(tree));
    let names: Vec<&str> = found.files.keys().filter_map(|path| path.strip_prefix(tree)).collect();
    let expected = [r"/a\\udcff-info", r"/a\udcff-info", "/\u{e9}-info"];
    assert_eq!(names, expected.map(|name| format!("{name}/entry_points.txt")));

    let (image, existed) = (image(), |_: &str| false);
    let rules = InstallationRules::new(tree, "owner/calc", EDITABLE, &image, &existed);
    assert!(rules.new_hook(&found).is_some_and(|path| path.contains("udcff")));
}
