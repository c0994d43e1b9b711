//! Enumerations whose variants are words: in the configuration, over the wire and in reports.

/// Declares enumerations whose variants are words: each variant once, with its word and its meaning.
macro_rules! choices {
    ($(
        $( #[doc = $about:literal] )+
        $Name:ident {
            $( $( #[doc = $doc:literal] )+ $Variant:ident = $word:literal, )+
        }
    )+) => {$(
        $( #[doc = $about] )+
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, ::serde::Serialize, ::serde::Deserialize,
        )]
        pub enum $Name {
            $( $( #[doc = $doc] )+ #[serde(rename = $word)] $Variant, )+
        }

        impl $Name {
            pub const WORDS: &'static [(&'static str, Self)] = &[$( ($word, Self::$Variant), )+];

            /// The stable word.
            #[must_use]
            pub const fn word(self) -> &'static str {
                match self {
                    $( Self::$Variant => $word, )+
                }
            }
        }

        impl ::std::fmt::Display for $Name {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                f.write_str(self.word())
            }
        }
    )+};
}

pub(crate) use choices;
