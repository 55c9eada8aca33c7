//! The macros that declare a section.

/// Declares a section of the configuration; see the [crate's documentation](crate).
///
/// ```text
/// settings! {
///     /// Description of the section.
///     #[derive(Eq)]                                    // additional traits, optional
///     [name] pub NameSection -> NameSettings, check: function;   // `check:` is optional
///
///     /// Description of the key.
///     key: Type = default, limit, limit;
///     /// A default that depends on keys above, with the text that describes it.
///     other: Type = key * 2 => "twice `key`", limit;
///     /// An optional key, with the text that describes its absence.
///     optional: Option<Type> = None => "no limit";
/// }
/// ```
///
/// The function of `check:` takes the section, the settings and
/// [`&mut Problems`](crate::Problems); it checks rules over several keys.
#[macro_export]
macro_rules! settings {
    (
        $(#[doc = $about:literal])*
        $(#[derive($($derive:ident),+)])?
        [$($part:ident).+] $vis:vis $section:ident -> $settings:ident $(, check: $check:path)?;
        $($keys:tt)*
    ) => {
        $crate::declare_section! {
            $(#[doc = $about])*
            $(#[derive($($derive),+)])?
            [$($part).+] $vis $section -> $settings;
            $($keys)*
        }

        impl $section {
            /// Fills in defaults and checks each value, and all of them together.
            ///
            /// # Errors
            /// All problems of the section at once.
            $vis fn check(
                &self,
            ) -> ::std::result::Result<$settings, ::std::vec::Vec<::orchestrate_types::ConfigProblem>>
            {
                let settings = <Self as $crate::SectionKeys>::fill(self);
                let mut problems =
                    $crate::Problems::new(<Self as $crate::SectionKeys>::NAME);
                <Self as $crate::SectionKeys>::check_values(&settings, &mut problems);
                $($check(self, &settings, &mut problems);)?
                problems.into_result(settings)
            }
        }

        impl $crate::Section for $section {
            type Settings = $settings;

            fn check_section(
                &self,
            ) -> ::std::result::Result<$settings, ::std::vec::Vec<::orchestrate_types::ConfigProblem>>
            {
                self.check()
            }

            fn from_settings(settings: &$settings) -> Self {
                <Self as $crate::SectionKeys>::from_values(settings)
            }
        }
    };
}

/// Declares the types of a section and the metadata of its keys, without a check of all keys
/// together.
///
/// The base of [`settings!`](crate::settings), which takes the same declaration. The function of
/// `amend:` takes the metadata, a `&mut Vec<KeyInfo>`, and completes it.
#[macro_export]
macro_rules! declare_section {
    (
        $(#[doc = $about:literal])*
        $(#[derive($($derive:ident),+)])?
        [$($part:ident).+] $vis:vis $section:ident -> $settings:ident $(, amend: $amend:path)?;
        $(
            $(#[doc = $doc:literal])*
            $name:ident : $type:ty = $default:expr $(=> $absent:literal)? $(, $limit:expr)*;
        )*
    ) => {
        $(#[doc = $about])*
        ///
        /// As written: every key may be left out.
        #[derive(
            Debug, Clone, Default, PartialEq, ::serde::Serialize, ::serde::Deserialize,
            $($($derive),+)?
        )]
        #[serde(deny_unknown_fields)]
        $vis struct $section {
            $(
                $(#[doc = $doc])*
                $vis $name: ::std::option::Option<<$type as $crate::Setting>::Written>,
            )*
        }

        $(#[doc = $about])*
        ///
        /// Checked, with every default filled in.
        #[derive(Debug, Clone, PartialEq, $($($derive),+)?)]
        $vis struct $settings {
            $(
                $(#[doc = $doc])*
                $vis $name: $type,
            )*
        }

        impl $crate::SectionKeys for $section {
            const NAME: &'static str = $crate::declare_section!(@name $($part).+);
            const ABOUT: &'static [&'static str] = &[$($about),*];
            type Values = $settings;

            fn fill(&self) -> $settings {
                $(
                    let $name: $type = match &self.$name {
                        Some(written) => $crate::Setting::from_written(
                            ::std::clone::Clone::clone(written),
                        ),
                        None => $default,
                    };
                )*
                $settings { $($name),* }
            }

            fn from_values(values: &$settings) -> Self {
                Self { $($name: $crate::Setting::to_written(&values.$name)),* }
            }

            fn check_values(values: &$settings, problems: &mut $crate::Problems) {
                $(
                    $(
                        if let Some(value) = $crate::Setting::limited(&values.$name) {
                            let limit =
                                $crate::limited::<<$type as $crate::Setting>::Limited, _>($limit);
                            if let Some((value, remedy)) = $crate::Limit::refusal(&limit, value) {
                                problems.refuse(stringify!($name), value, remedy);
                            }
                        }
                    )*
                    $crate::Setting::check_inside(&values.$name, stringify!($name), problems);
                )*
            }

            fn keys(
                generator: &mut $crate::schemars::SchemaGenerator,
            ) -> ::std::vec::Vec<$crate::KeyInfo> {
                let defaults = Self::from_values(&Self::default().fill());
                let defaults = $crate::serde_json::to_value(defaults).unwrap_or_default();
                let mut keys = ::std::vec::Vec::new();
                $(
                    let schema =
                        generator.subschema_for::<<$type as $crate::Setting>::Written>();
                    let key =
                        $crate::KeyInfo::new(stringify!($name), &[$($doc),*], schema, &defaults);
                    $(
                        let key = key.absent($absent);
                    )?
                    $(
                        let limit =
                            $crate::limited::<<$type as $crate::Setting>::Limited, _>($limit);
                        let key = key.limit(&limit);
                    )*
                    keys.push(key);
                )*
                $($amend(&mut keys);)?
                keys
            }

            fn given(&self) -> ::std::vec::Vec<&'static str> {
                let mut given = ::std::vec::Vec::new();
                $(
                    if self.$name.is_some() {
                        given.push(stringify!($name));
                    }
                )*
                given
            }

            fn clear(&mut self, key: &str) {
                $(
                    if key == stringify!($name) {
                        self.$name = None;
                    }
                )*
            }

            fn map_paths(&mut self, map: &mut dyn ::std::ops::FnMut(&mut ::std::string::String)) {
                $(
                    if let Some(written) = &mut self.$name {
                        <$type as $crate::Setting>::map_paths(written, map);
                    }
                )*
            }
        }

        impl ::std::default::Default for $settings {
            fn default() -> Self {
                <$section as $crate::SectionKeys>::fill(&$section::default())
            }
        }

        impl $crate::Setting for $settings {
            type Written = $section;
            type Limited = Self;

            fn from_written(written: $section) -> Self {
                $crate::SectionKeys::fill(&written)
            }

            fn to_written(&self) -> ::std::option::Option<$section> {
                Some($crate::SectionKeys::from_values(self))
            }

            fn limited(&self) -> ::std::option::Option<&Self> {
                Some(self)
            }

            fn check_inside(&self, key: &str, problems: &mut $crate::Problems) {
                problems.within(key, |problems| {
                    <$section as $crate::SectionKeys>::check_values(self, problems);
                });
            }

            fn map_paths(
                written: &mut $section,
                map: &mut dyn ::std::ops::FnMut(&mut ::std::string::String),
            ) {
                $crate::SectionKeys::map_paths(written, map);
            }
        }

        impl $crate::schemars::JsonSchema for $section {
            fn schema_name() -> ::std::borrow::Cow<'static, str> {
                stringify!($section).into()
            }

            fn json_schema(
                generator: &mut $crate::schemars::SchemaGenerator,
            ) -> $crate::schemars::Schema {
                $crate::KeyInfo::section_schema::<Self>(generator)
            }
        }
    };
    (@name $first:ident $(. $part:ident)*) => {
        concat!(stringify!($first) $(, ".", stringify!($part))*)
    };
}
