//! The macro behind `schema`: one declaration of a key gives its field, its reading, its display and its known
//! name, so that none of them can be forgotten.

/// A key is `/// doc`, then `name: Type = "default text", kind;`. The default goes through the same parser as an
/// operator's text.
macro_rules! sections {
    ($(
        #[doc = $about:literal]
        $section:ident: $Section:ident {
            $( #[doc = $doc:literal] $key:ident: $Value:ty = $default:literal, $kind:expr; )+
        }
    )+) => {
        /// The whole configuration, valid in every field.
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct Config {
            $( #[doc = $about] pub $section: $Section, )+
        }

        $(
            #[doc = $about]
            #[derive(Debug, Clone, PartialEq, Eq)]
            pub struct $Section {
                $( #[doc = $doc] pub $key: $Value, )+
            }

            impl $Section {
                fn read(reader: &mut $crate::config::reader::SettingsReader) -> Option<Self> {
                    // All keys are read before the first result is used, so that all problems are found.
                    $( let $key = reader.read(stringify!($section), stringify!($key), $default, &$kind); )+
                    Some(Self { $( $key: $key?, )+ })
                }
            }
        )+

        impl Config {
            pub(super) fn read(reader: &mut $crate::config::reader::SettingsReader) -> Option<Self> {
                $( let $section = $Section::read(reader); )+
                Some(Self { $( $section: $section?, )+ })
            }

            pub(super) fn show(
                &self,
                origins: &::std::collections::BTreeMap<String, $crate::config::SettingOrigin>,
            ) -> Vec<$crate::config::Shown> {
                use $crate::config::kinds::Kind as _;

                let origin = |path| origins.get(path).cloned().unwrap_or($crate::config::SettingOrigin::Default);
                vec![$($( {
                    let path = concat!(stringify!($section), ".", stringify!($key));
                    $crate::config::Shown {
                        path,
                        value: $kind.show(&self.$section.$key),
                        default: $default,
                        origin: origin(path),
                        written_as: None,
                        old_names: Vec::new(),
                        accepts: $kind.accepts(),
                        doc: $doc.trim_ascii(),
                    }
                }, )+)+]
            }
        }

        /// Each section with its keys.
        pub(super) const SECTIONS: &[(&str, &[&str])] = &[
            $( (stringify!($section), &[$( stringify!($key), )+]), )+
        ];
    };
}

pub(super) use sections;
